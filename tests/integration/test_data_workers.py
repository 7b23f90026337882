"""Training with worker processes that read the data."""

import multiprocessing

import pytest

from megatron.checkpoint.directory import saved_iterations
from megatron.config import UserError
from megatron.training.engine import Engine
from tests.support.runs import metrics, trained


def test_a_killed_data_worker_stops_the_run_after_it_has_saved(tmp_path, data_path, monkeypatch):
    """As by the kernel when memory is full. The resumed run equals one without this."""
    trained(tmp_path / "expected", data_path)
    train_step = Engine.train_step

    def kill_workers(engine, batches, learning_rate, iteration):
        loss = train_step(engine, batches, learning_rate, iteration)
        if iteration == 0:
            for worker in multiprocessing.active_children():
                worker.kill()
        return loss

    keys = {"num_workers": 1, "save_interval": 100, "eval_iters": 0}
    monkeypatch.setattr(Engine, "train_step", kill_workers)
    with pytest.raises(UserError, match="num_workers") as error:
        trained(tmp_path, data_path, **keys)
    (saved,) = saved_iterations(tmp_path / "checkpoints")
    assert 1 <= saved < 6
    assert f"iteration {saved}" in str(error.value)
    monkeypatch.setattr(Engine, "train_step", train_step)
    trained(tmp_path, data_path, **keys)
    assert metrics(tmp_path) == metrics(tmp_path / "expected")
