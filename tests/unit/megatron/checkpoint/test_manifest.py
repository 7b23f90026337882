"""The manifest: damaged checkpoints, and what replaces them."""

import json

import pytest
import torch

from megatron.checkpoint.directory import MANIFEST, STATE_FILE
from megatron.checkpoint.manifest import (
    find_damage,
    find_valid_step,
    read_manifest,
    write_manifest_of_folder,
)
from megatron.checkpoint.storage import CheckpointError
from tests.support.checkpoint_folders import flip_bit, save


@pytest.mark.parametrize("how", ["altered", "cut", "missing", "manifest"])
def test_damage_is_named_with_the_newest_valid_checkpoint(how, tmp_path):
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    file = tmp_path / "global_step30" / (MANIFEST if how == "manifest" else "weights.pt")
    if how == "altered":
        flip_bit(file)
    elif how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:40])
    flip_bit(tmp_path / "global_step20" / "configs" / "config.yml")
    with pytest.raises(CheckpointError, match=rf"global_step30/{file.name}: .*10.*--fallback"):
        find_valid_step(tmp_path)
    reports = []
    assert find_valid_step(tmp_path, fallback=True, report=reports.append).name == "global_step10"
    assert file.name in reports[0]


def test_latest_that_names_a_missing_checkpoint(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").write_text("global_step2")
    with pytest.raises(CheckpointError, match=r"global_step2.*1.*--fallback"):
        find_valid_step(tmp_path)
    assert find_valid_step(tmp_path, fallback=True, report=lambda text: None).name == "global_step1"


def test_no_checkpoint_in_the_place_of_another(tmp_path):
    """One of another iteration, or a damaged one, is no fallback."""
    save(tmp_path, 1)
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"iteration 2; available: 1$"):
            find_valid_step(tmp_path, 2, fallback=fallback)
    flip_bit(tmp_path / "global_step1" / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        find_valid_step(tmp_path, fallback=True)


@pytest.mark.parametrize("name", ["other.pt", "configs/later.yml", "configs/later.yaml"])
def test_a_file_that_was_not_saved(name, tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step1" / name).write_text("{}")
    with pytest.raises(CheckpointError, match=name):
        find_valid_step(tmp_path)


def test_a_checkpoint_under_the_name_of_another_iteration(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "global_step1").rename(tmp_path / "global_step2")
    with pytest.raises(CheckpointError, match=r"iteration 1.*global_step1"):
        find_valid_step(tmp_path, 2)


def test_a_fallback_is_of_the_same_run(tmp_path):
    """The damaged checkpoint continues iteration 10, not that of an abandoned branch."""
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    step = tmp_path / "global_step30"
    torch.save({"training": {"lineage": [10, 30]}}, step / STATE_FILE)
    assert STATE_FILE in find_damage(step)  # a file that is not in the manifest
    found = find_valid_step(tmp_path, fallback=True, report=lambda text: None)
    assert found.name == "global_step10"


def test_a_manifest_of_a_folder_lists_its_files(tmp_path):
    """Without itself, and without hidden files."""
    save(tmp_path, 1)
    step = tmp_path / "global_step1"
    (step / "._weights.pt").write_bytes(b"of macOS")
    for _ in range(2):
        write_manifest_of_folder(step, 1)
        assert set(read_manifest(step)) == {"weights.pt", "configs/config.yml"}
    assert find_damage(step) is None


def test_ranks_share_the_verification(tmp_path):
    save(tmp_path, 1)
    flip_bit(tmp_path / "global_step1" / "configs" / "config.yml")
    results = [find_damage(tmp_path / "global_step1", share=(rank, 2)) for rank in range(2)]
    assert sum(damage is not None for damage in results) == 1


def test_a_file_that_grew_is_damaged(tmp_path):
    """Also where only sizes are compared."""
    save(tmp_path, 5)
    with open(tmp_path / "global_step5" / "weights.pt", "ab") as file:
        file.write(b"\0")
    assert "weights.pt" in find_damage(tmp_path / "global_step5", contents=False)


@pytest.mark.parametrize("change", [{"files": []}, {"files": {"a": {"size": 1}}}, {"format": 2}])
def test_a_damaged_manifest(change, tmp_path):
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "global_step1" / MANIFEST).read_text())
    (tmp_path / "global_step1" / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match=rf"{MANIFEST}: is not a checkpoint manifest"):
        read_manifest(tmp_path / "global_step1")
