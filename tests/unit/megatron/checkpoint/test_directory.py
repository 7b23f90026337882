"""Names in the checkpoint directory."""

import pytest
import torch

from megatron.checkpoint.directory import (
    STATE_FILE,
    find_step,
    has_checkpoint,
    read_state_file,
)
from megatron.checkpoint.storage import CheckpointError
from tests.support.checkpoint_folders import save


@pytest.mark.parametrize("content", [b"", b"../../x", b"x" * 5000, None])
def test_latest_of_any_content(content, tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    if content is None:
        (tmp_path / "latest").mkdir()
    else:
        (tmp_path / "latest").write_bytes(content)
    assert has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"latest.*available"):
        find_step(tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_names_that_no_folder_can_have(name):
    with pytest.raises(CheckpointError, match="no such folder"):
        find_step(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "list"),
        ({"training": 3}, "training"),
        *(({"iteration": count}, "iteration") for count in (-1, 2**63, True, 1.0, "3")),
        ({"global_samples": -1}, "global_samples"),
    ],
)
def test_a_damaged_state_file(content, message, tmp_path):
    torch.save(content, tmp_path / STATE_FILE)
    with pytest.raises(CheckpointError, match=rf"{STATE_FILE}: .*{message}"):
        read_state_file(tmp_path)


def test_counts_of_a_state_file(tmp_path):
    assert read_state_file(tmp_path) == {}
    for content in ({"iteration": 0, "global_samples": 2**63 - 1}, {"iteration": None}):
        torch.save(content, tmp_path / STATE_FILE)
        assert read_state_file(tmp_path) == content
