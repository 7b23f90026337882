"""Runs of the retrofit experiment on a tiny rotary model."""

import json

import pytest
import torch

from experiments.retrofit import run as retrofit
from megatron.data.streams import evaluation_stream
from megatron.inference import load_model
from tests.support.checkpoints import write_checkpoint, write_corpus
from tests.support.language_models import direct_losses

LENGTH = 32


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(retrofit, "STEPS", (0, 2))
    monkeypatch.setattr(retrofit, "FACTORS", (1, 4))
    monkeypatch.setattr(retrofit, "SCORED_TOKENS", 256)
    folder = tmp_path / "rotary"
    write_checkpoint(folder, "rotary", write_corpus(tmp_path))
    return folder


def losses(lines):
    """(steps, length) -> loss."""
    entries = [json.loads(line) for line in lines]
    assert all(entry["note"] is None and entry["tokens"] == 256 for entry in entries)
    return {(entry["steps"], entry["length"]): entry["loss"] for entry in entries}


def test_every_variant(checkpoint):
    found = {}
    for variant in (*retrofit.UNTRAINED, *retrofit.TRAINED):
        found[variant] = losses(retrofit.run(checkpoint, variant, 11, 1.0))
    # Before training, the control is the model itself.
    model, config = load_model(checkpoint)
    stream, _ = evaluation_stream(config, "valid")
    rows = stream[torch.arange(0, 256, 128)[:, None] + torch.arange(129)]
    with torch.no_grad():
        expected = direct_losses(model(rows[:, :-1]), rows[:, 1:]).mean().item()
    assert found["control"][0, 128] == pytest.approx(expected, abs=2e-5)
    for variant, values in found.items():
        steps = (0,) if variant in retrofit.UNTRAINED else (0, 2)
        assert set(values) == {(step, length) for step in steps for length in (LENGTH, 128)}
    # Training with the same data lowers the loss, less if only two numbers per head change.
    for variant in ("control", "kerple_log"):
        assert found[variant][2, LENGTH] < found[variant][0, LENGTH] - 1e-3
    frozen = found["kerple_log_frozen"]
    assert frozen[0, LENGTH] == found["kerple_log"][0, LENGTH]
    assert found["kerple_log"][2, LENGTH] < frozen[2, LENGTH] != frozen[0, LENGTH]
    # A lower learning rate changes it less.
    slower = losses(retrofit.run(checkpoint, "control", 11, 0.3))
    assert found["control"][2, LENGTH] < slower[2, LENGTH] < slower[0, LENGTH]


def test_batches_are_those_of_the_seed(checkpoint):
    _, config = load_model(checkpoint)
    stream, _ = evaluation_stream(config, "train")
    rows = []
    for seed in (3, 3, 4):
        rows.append(retrofit.batch(stream, LENGTH, torch.Generator().manual_seed(seed)))
    assert rows[0].shape == (retrofit.BATCH, LENGTH + 1)
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
