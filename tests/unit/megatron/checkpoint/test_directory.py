"""The checkpoint directory: damaged checkpoints, deletion, and processes killed between any two system calls."""

import os
import shutil
import sys

import pytest
import torch

from megatron.checkpoint.directory import (
    MANIFEST,
    clean_up,
    find_damage,
    find_step,
    find_valid_step,
    publish,
    read_manifest,
    remove_older,
    saved_iterations,
    tag_for,
    write_manifest,
)
from megatron.checkpoint.saving import write_files
from megatron.checkpoint.storage import CheckpointError, load_tensors


def save(directory, iteration, value=None, keep=None):
    """Save a checkpoint of two files, with the steps of megatron.checkpoint.saving."""
    directory.mkdir(exist_ok=True)
    clean_up(directory)
    unfinished = directory / f"{tag_for(iteration)}.unfinished"
    unfinished.mkdir()
    weights = {"w": torch.full((1000,), float(iteration if value is None else value))}
    records, failure = write_files(unfinished, [("weights.pt", weights), ("configs/config.yml", b"{}\n")])
    assert failure is None
    write_manifest(unfinished, iteration, records)
    publish(directory, unfinished, tag_for(iteration))
    if keep is not None:
        remove_older(directory, keep, iteration)


def value_of(step):
    return load_tensors(step / "weights.pt")["w"][0].item()


def flip_bit(path):
    """Flip one bit in the middle, as a failing disk does; the size does not change."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_clean_up_removes_what_a_killed_process_left(tmp_path):
    save(tmp_path, 5)
    (tmp_path / ".shared-host-123").touch()
    (tmp_path / "latest.partial-123").touch()
    (tmp_path / "global_step6.unfinished").mkdir()
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step5", "latest"]


def test_manifest_lists_every_file(tmp_path):
    save(tmp_path, 5)
    step = find_valid_step(tmp_path)
    assert set(read_manifest(step)) == {"weights.pt", "configs/config.yml"}
    assert read_manifest(step)["configs/config.yml"].size == 3
    assert find_damage(step) is None


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
    with pytest.raises(CheckpointError, match=rf"global_step30/{file.name}: .*iteration 10; use it with --fallback"):
        find_valid_step(tmp_path)
    reports = []
    assert find_valid_step(tmp_path, fallback=True, report=reports.append).name == "global_step10"
    assert file.name in reports[0]


def test_latest_that_names_a_missing_checkpoint(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").write_text("global_step2")
    with pytest.raises(CheckpointError, match=r"global_step2.*iteration 1; use it with --fallback"):
        find_valid_step(tmp_path)
    assert find_valid_step(tmp_path, fallback=True, report=lambda text: None).name == "global_step1"


def test_no_other_valid_checkpoint(tmp_path):
    save(tmp_path, 1)
    flip_bit(tmp_path / "global_step1" / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt.*no other valid"):
        find_valid_step(tmp_path, fallback=True)


def test_ranks_share_the_verification(tmp_path):
    save(tmp_path, 1)
    flip_bit(tmp_path / "global_step1" / "configs" / "config.yml")
    results = [find_damage(tmp_path / "global_step1", share=(rank, 2)) for rank in range(2)]
    assert sum(damage is not None for damage in results) == 1


def test_the_only_valid_checkpoint_is_not_deleted(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "global_step2" / "weights.pt").write_bytes(b"")
    assert remove_older(tmp_path, 1, 2) == []
    assert saved_iterations(tmp_path) == [1, 2]


def test_checkpoints_of_later_iterations_do_not_count(tmp_path):
    """They belong to a run that was rolled back; the newest of this run stays."""
    for iteration in (1, 2, 9):
        save(tmp_path, iteration)
    save(tmp_path, 3, keep=2)
    assert saved_iterations(tmp_path) == [2, 3, 9]
    assert find_step(tmp_path).name == "global_step3"


def killed_before_event(number, action):
    """Run `action` in a forked process that exits, without any clean-up, before its `number`-th file operation. Returns
    False if the action completed before.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    events = 0

    def count(event, _):
        nonlocal events
        if event == "open" or event.startswith(("os.", "shutil.")):
            events += 1
            if events > number:
                os._exit(9)

    sys.addaudithook(count)
    try:
        action()
    finally:
        os._exit(0)


@pytest.mark.parametrize("iteration", [3, 2], ids=["next", "same-again"])
def test_killed_before_any_system_call(iteration, tmp_path, monkeypatch):
    """Saving a new iteration, and replacing the checkpoint that `latest` names."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and irrelevant for a kill
    save(tmp_path / "template", 1)
    save(tmp_path / "template", 2)
    number = 0
    while True:
        directory = shutil.copytree(tmp_path / "template", tmp_path / str(number))
        killed = killed_before_event(number, lambda folder=directory: save(folder, iteration, value=7, keep=1))
        step = find_valid_step(directory)
        value = value_of(step)
        assert value in (2.0, 7.0)
        assert find_damage(step) is None
        # A second kill during the clean-up, and then a complete save.
        killed_before_event(number % 5, lambda folder=directory: clean_up(folder))
        assert value_of(find_valid_step(directory)) == value
        save(directory, iteration, value=8, keep=1)
        assert value_of(find_valid_step(directory)) == 8.0
        assert sorted(path.name for path in directory.iterdir()) == [f"global_step{iteration}", "latest"]
        if not killed:
            break
        number += 1
    assert number > 20
