"""The training log: console, metrics, TensorBoard, Weights & Biases, and the timing of iterations."""

import os

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.config import Config
from megatron.training.logging import StepLog
from megatron.training.loop import train
from tests.support.runs import metrics, training_settings


def test_tensorboard_and_wandb_contain_the_metrics(tmp_path, data_path, monkeypatch, wandb_offline, capsys):
    """Weights & Biases writes an offline run, and no file contains the API key."""
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


def test_the_mfu_uses_the_configured_peak(tmp_path, data_path):
    """On a CPU there is no MFU without `peak_theoretical_tflops`."""
    for tflops in (None, 0.5, 2.0):
        folder = tmp_path / str(tflops)
        train(Config.from_flat(training_settings(folder, data_path, peak_theoretical_tflops=tflops)))
    assert metrics(tmp_path / "None", "train/mfu") == {}
    flops_per_token = [
        tflops
        * 1e12
        * metrics(tmp_path / str(tflops), "train/mfu")[6]
        / metrics(tmp_path / str(tflops), "train/tokens_per_second")[6]
        for tflops in (0.5, 2.0)
    ]
    assert flops_per_token[0] == pytest.approx(flops_per_token[1])


def test_pauses_are_not_counted_as_training(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("megatron.training.logging.time.perf_counter", lambda: now[0])
    log = StepLog(None, None, None, 0.0)
    now[0] = 3.0
    with log.paused():
        now[0] = 100.0
    now[0] = 102.0
    with log.paused():
        assert log.seconds == pytest.approx(5.0)
