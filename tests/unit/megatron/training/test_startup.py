"""Checks before anything is built: folders, the lock, and the machine."""

import contextlib
import os

import pytest

from megatron.config import UserError
from megatron.training import loop, startup
from megatron.utils.processes import Lock
from tests.support.errors import assert_rejected
from tests.support.runs import metrics, trained


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Building the datasets or the model fails the test."""
    for name in ("build_datasets", "build_engine"):
        monkeypatch.setattr(loop, name, lambda *_, name=name: pytest.fail(f"{name} was called"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"save": "file/x"}, "save.*file/x"),
        ({"log_dir": "file/x"}, r"file/x/log\.lock"),
        ({"tensorboard_dir": "file/x"}, r"file/x/log\.lock"),
        ({"attention_backend": "flex"}, "\"attention_backend\".*'flex'"),
        ({"attention_backend": "fused"}, "\"attention_backend\".*'fused'"),
    ],
)
def test_folders_and_backends_that_cannot_be_used(
    keys, message, tmp_path, data_path, nothing_is_built, monkeypatch
):
    monkeypatch.setattr("kerple.attention.backends.triton.launch._load_kernels", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file")
    assert_rejected(message, trained, tmp_path, data_path, **keys)


def test_the_disk_of_the_log_is_full(tmp_path, data_path, nothing_is_built):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train.log").symlink_to("/dev/full")
    assert_rejected(r"log-dir.*logs/train\.log", trained, tmp_path, data_path)


def test_a_cache_folder_that_is_not_writable(tmp_path, data_path, monkeypatch):
    """The sample indices are written before the model is built."""
    monkeypatch.setattr(loop, "build_engine", lambda *_: pytest.fail("the model was built"))
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=r"file/x.*data-cache-path"):
        trained(tmp_path, data_path, data_cache_path=str(tmp_path / "file" / "x"))


def test_two_runs_cannot_save_to_the_same_folder(tmp_path, data_path, nothing_is_built):
    with Lock(tmp_path / "checkpoints" / "run.lock", "held"):
        assert_rejected(
            r"save: .*checkpoints; .*\(held by process \d+ on ", trained, tmp_path, data_path
        )
        assert not (tmp_path / "logs" / "metrics.jsonl").exists()
        # A run that only evaluates needs no lock.
        assert_rejected("contains no checkpoint", trained, tmp_path, data_path, train_iters=0)


@pytest.mark.parametrize("key", ["log_dir", "tensorboard_dir"])
def test_two_runs_cannot_log_to_the_same_folder(key, tmp_path, data_path, nothing_is_built):
    message = rf"{key.replace('_', '-')}: .*shared.*process {os.getpid()}"
    with Lock(tmp_path / "shared" / "log.lock", "held"), pytest.raises(UserError, match=message):
        trained(tmp_path, data_path, **{key: str(tmp_path / "shared")})
    assert not (tmp_path / "checkpoints").exists()


def test_one_folder_in_two_spellings(tmp_path, data_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    keys = {
        "log_dir": str(tmp_path / "logs"),
        "tensorboard_dir": "other/../logs",
        "train_iters": 1,
        "eval_iters": 0,
    }
    trained(tmp_path, data_path, **keys)
    assert list(metrics(tmp_path)) == [1]
    assert list((tmp_path / "logs").glob("events.*"))


def test_the_lock_is_released_after_success_and_failure(tmp_path, data_path):
    trained(tmp_path, data_path)
    assert not (tmp_path / "checkpoints" / "run.lock").exists()
    keys = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e20}},
        "warmup": 0.0,
        "gradient_clipping": 0.0,
    }
    assert_rejected("not finite", trained, tmp_path / "failed", data_path, **keys)
    assert not (tmp_path / "failed" / "checkpoints").exists()


def test_all_hosts_must_share_the_folder(tmp_path, monkeypatch):
    with contextlib.ExitStack() as resources:
        startup.lock_save_folder(str(tmp_path), resources)
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]

    def on_a_host_with_a_folder_of_its_own(check):
        for path in tmp_path.iterdir():
            path.unlink()
        check()

    monkeypatch.setattr(startup, "run_on_all_ranks", on_a_host_with_a_folder_of_its_own)
    with contextlib.ExitStack() as resources, pytest.raises(UserError, match="rank 0"):
        startup.lock_save_folder(str(tmp_path), resources)
