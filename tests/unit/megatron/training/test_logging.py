"""Where a run's numbers go."""

import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import metrics, training_settings


def test_tensorboard_and_wandb_hold_the_numbers_of_the_console(tmp_path, data_path, monkeypatch, wandb_offline, capsys):
    """Weights & Biases offline: the run is written to disk, and no key is written anywhere."""
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    keys = {"tensorboard_dir": str(tmp_path / "tensorboard"), "use_wandb": True, "wandb_project": "extrapolation"}
    train(Config.from_flat(training_settings(tmp_path, data_path, **keys)))

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx(metrics(tmp_path))
    tags = set(events.Tags()["scalars"])
    assert {"train/learning_rate", "train/grad_norm", "train/tokens_per_second", "train/memory_bytes"} <= tags
    assert {"validation/loss", "validation/perplexity", "kernel/bias_p/mean", "kernel/bias_a/max"} <= tags

    (offline,) = wandb_offline.glob("offline-run-*")
    assert any(path.suffix == ".wandb" and path.stat().st_size > 1000 for path in offline.iterdir())
    console = capsys.readouterr().out
    assert "iteration 6/6 | lm loss" in console
    assert "bias_p: " in console
    for folder, _, files in os.walk(tmp_path):
        for name in files:
            with open(os.path.join(folder, name), "rb") as handle:
                assert secret.encode() not in handle.read(), name


def test_learning_rate_follows_the_schedule(tmp_path, data_path):
    settings = training_settings(tmp_path, data_path, warmup=0.2, lr_decay_iters=10, train_iters=4, save=None)
    train(Config.from_flat(settings))
    assert metrics(tmp_path, "train/learning_rate") == pytest.approx(
        {1: 0.0, 2: 0.0025, 3: 0.005, 4: 0.005 * 0.97553}, rel=1e-3
    )
