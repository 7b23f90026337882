"""The checkpoint directory: damaged checkpoints, deletion, and processes killed between any two
system calls.
"""

import json
import os
import shutil
import sys
import traceback
from functools import partial

import pytest
import torch

from megatron.checkpoint.directory import (
    MANIFEST,
    STATE_FILE,
    check_replaced,
    clean_up,
    find_damage,
    find_step,
    find_valid_step,
    has_checkpoint,
    publish,
    read_manifest,
    remove_older,
    saved_iterations,
    tag_for,
    write_manifest,
)
from megatron.checkpoint.saving import write_files
from megatron.checkpoint.storage import CheckpointError, load_tensors
from tests.support.errors import assert_rejected


def save(directory, iteration, value=None, keep=None):
    """Save a checkpoint of two files, with the steps of megatron.checkpoint.saving."""
    directory.mkdir(exist_ok=True)
    clean_up(directory)
    unfinished = directory / f"{tag_for(iteration)}.unfinished"
    unfinished.mkdir()
    weights = {"w": torch.full((1000,), float(iteration if value is None else value))}
    records, failure = write_files(
        unfinished, [("weights.pt", weights), ("configs/config.yml", b"{}\n")]
    )
    assert failure is None
    write_manifest(unfinished, iteration, records)
    publish(directory, unfinished, tag_for(iteration))
    if keep is not None:
        list(remove_older(directory, keep, range(iteration + 1)))


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


def test_clean_up_completes_a_first_save(tmp_path):
    """Killed before `latest` was written; with several checkpoints, `latest` was lost in another
    way.
    """
    save(tmp_path, 5)
    (tmp_path / "latest").unlink()
    clean_up(tmp_path)
    assert find_step(tmp_path).name == "global_step5"
    save(tmp_path, 6)
    (tmp_path / "latest").unlink()
    clean_up(tmp_path)
    assert not has_checkpoint(tmp_path)


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


def test_an_iteration_without_checkpoint(tmp_path):
    save(tmp_path, 1)
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"iteration 2; available: 1$"):
            find_valid_step(tmp_path, 2, fallback=fallback)


def test_no_other_valid_checkpoint(tmp_path):
    save(tmp_path, 1)
    flip_bit(tmp_path / "global_step1" / "weights.pt")
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
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
    assert list(remove_older(tmp_path, 1, [1, 2])) == []
    assert saved_iterations(tmp_path) == [1, 2]


def test_a_damaged_checkpoint_does_not_stop_the_deletion_of_others(tmp_path):
    for iteration in (2, 4, 6, 8):
        save(tmp_path, iteration)
    (tmp_path / "global_step6" / "weights.pt").write_bytes(b"")
    assert list(remove_older(tmp_path, 2, [2, 4, 6, 8])) == [2, 4]
    assert saved_iterations(tmp_path) == [6, 8]


def test_the_checkpoint_that_latest_names_is_not_deleted(tmp_path):
    for iteration in (2, 4, 6):
        save(tmp_path, iteration)
    (tmp_path / "latest").write_text("global_step4")
    assert list(remove_older(tmp_path, 1, [2, 4, 6])) == [2]
    assert saved_iterations(tmp_path) == [4, 6]


def test_a_file_that_grew_is_damaged(tmp_path):
    """Also where only sizes are compared."""
    save(tmp_path, 5)
    with open(tmp_path / "global_step5" / "weights.pt", "ab") as file:
        file.write(b"\0")
    assert "weights.pt" in find_damage(tmp_path / "global_step5", contents=False)


@pytest.mark.parametrize(
    ("lineage", "expected"),
    [
        ([], [3, 5]),
        ([2], [3, 5]),
        ([2, 3], [3, 5]),
        ([2, 4], None),
        ([2, 3, 5, 6], None),
        (None, None),
    ],
)
def test_only_checkpoints_of_the_same_run_are_replaced(lineage, expected, tmp_path):
    """The saved run began at iteration 2."""
    saved_lineage = [2]
    for iteration in (3, 5):
        saved_lineage = [*saved_lineage, iteration]
        save(tmp_path, iteration)
        torch.save(
            {"training": {"lineage": saved_lineage}}, tmp_path / tag_for(iteration) / STATE_FILE
        )
    assert check_replaced(tmp_path, lambda iteration: iteration == 4, lineage) == []
    if expected is None:
        assert_rejected(
            "global_step", check_replaced, tmp_path, lambda iteration: iteration in (3, 5), lineage
        )
    else:
        assert check_replaced(tmp_path, lambda iteration: iteration in (3, 5), lineage) == expected


def test_checkpoints_may_be_links(tmp_path):
    """Only the link is deleted or replaced."""
    save(tmp_path / "archive", 1)
    save(tmp_path / "archive", 2)
    run = tmp_path / "run"
    save(run, 3)
    for iteration in (1, 2):
        (run / tag_for(iteration)).symlink_to(tmp_path / "archive" / tag_for(iteration))
    (run / "global_step4").symlink_to(tmp_path / "nowhere")
    save(run, 2, value=7, keep=1)
    save(run, 4)
    assert sorted(path.name for path in run.iterdir()) == [
        "global_step2",
        "global_step3",
        "global_step4",
        "latest",
    ]
    assert value_of(run / "global_step2") == 7.0
    assert saved_iterations(tmp_path / "archive") == [1, 2]
    assert value_of(tmp_path / "archive/global_step2") == 2.0


def test_checkpoints_of_later_iterations_do_not_count(tmp_path):
    """They belong to a run that was rolled back; the newest of this run stays."""
    for iteration in (1, 2, 9):
        save(tmp_path, iteration)
    save(tmp_path, 3, keep=2)
    assert saved_iterations(tmp_path) == [2, 3, 9]
    assert find_step(tmp_path).name == "global_step3"


def in_fork(action):
    """Run `action` in a forked process, because audit hooks stay until a process ends."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Kills:
    """Copies of a directory before each file operation of this process: what it leaves if it is
    killed there, without any clean-up.
    """

    def __init__(self):
        self._before_operation = None
        sys.addaudithook(self._audit)

    def _audit(self, event, _):
        before, self._before_operation = (
            self._before_operation,
            None,
        )  # not before the operations of copying
        if before is not None and (event == "open" or event.startswith(("os.", "shutil."))):
            before()
        self._before_operation = before

    def run(self, action, directory, copies, only=None):
        """Run `action`, and copy `directory` to `copies`/N before its N-th operation, or only
        before the N-th one. The last copy is made at the end, if `action` has fewer operations.
        """
        number = 0

        def before_operation():
            nonlocal number
            if only in (None, number):
                shutil.copytree(directory, copies / str(number))
            number += 1

        self._before_operation = before_operation
        action()
        self._before_operation = None
        if only is None or number <= only:
            shutil.copytree(directory, copies / str(number))


@pytest.mark.parametrize(
    "iteration", [pytest.param(3, marks=pytest.mark.ci), 2], ids=["next", "same-again"]
)
def test_killed_before_any_system_call(iteration, tmp_path, monkeypatch):
    """Saving a new iteration, and replacing the checkpoint that `latest` names. Then a second kill
    during the clean-up and a complete save.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow, and irrelevant for a kill
    saved, once, cleaned, twice = (
        tmp_path / name for name in ("saved", "once", "cleaned", "twice")
    )
    save(saved, 1)
    save(saved, 2)
    in_fork(lambda: Kills().run(lambda: save(saved, iteration, value=7, keep=1), saved, once))
    shutil.copytree(once, cleaned)
    names = [path.name for path in once.iterdir()]

    def clean_up_all():
        kills = Kills()
        for name in names:
            kills.run(
                partial(clean_up, cleaned / name), cleaned / name, twice / name, only=int(name) % 5
            )

    in_fork(clean_up_all)
    assert len(names) > 21
    values = []
    for name in names:
        step = find_valid_step(once / name)
        assert find_damage(step) is None
        values.append(value_of(step))
        (directory,) = (twice / name).iterdir()
        assert value_of(find_valid_step(directory)) == values[-1]
        save(directory, iteration, value=8, keep=1)
        assert value_of(find_valid_step(directory)) == 8.0
        assert sorted(path.name for path in directory.iterdir()) == [
            f"global_step{iteration}",
            "latest",
        ]
    assert set(values) == {2.0, 7.0}


@pytest.mark.parametrize("change", [{"files": []}, {"files": {"a": {"size": 1}}}, {"format": 2}])
def test_a_damaged_manifest(change, tmp_path):
    save(tmp_path, 1)
    manifest = json.loads((tmp_path / "global_step1" / MANIFEST).read_text())
    (tmp_path / "global_step1" / MANIFEST).write_text(json.dumps(manifest | change))
    with pytest.raises(CheckpointError, match=rf"{MANIFEST}: is not a checkpoint manifest"):
        read_manifest(tmp_path / "global_step1")


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
