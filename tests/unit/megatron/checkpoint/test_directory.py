"""Names in the checkpoint directory."""

import pytest

from megatron.checkpoint.directory import find_step, has_checkpoint
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
