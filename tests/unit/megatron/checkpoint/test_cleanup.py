"""Deletion and replacement, and processes killed between any two system calls."""

import os
import shutil
import sys
import traceback
from functools import partial

import pytest
import torch

from megatron.checkpoint.cleanup import check_replaced, clean_up, remove_older
from megatron.checkpoint.directory import (
    STATE_FILE,
    find_step,
    has_checkpoint,
    saved_iterations,
    tag_for,
)
from megatron.checkpoint.manifest import find_damage, find_valid_step
from tests.support.checkpoint_folders import save, value_of
from tests.support.errors import assert_rejected


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
