"""Losses that the original KERPLE code computed, measured by evaluate_extrapolation."""

import pytest
import torch

from megatron.evaluation import evaluate_extrapolation
from megatron.inference import load_model
from tests.support.language_models import direct_losses
from tests.support.release import METHODS, checkpoints, reference


def stream_of(numbers, row):
    """Inputs and the last label: one token more than is scored."""
    return torch.cat((numbers["tokens"][row], numbers["labels"][row, -1:])).long()


@pytest.mark.parametrize(
    ("method", "length"),
    [(method, length) for method in METHODS for length in (32, 128) if (method, length) != ("learned", 128)],
)
def test_losses_at_the_training_length_and_four_times_it(method, length):
    """Two texts each, in chunks of 16 through the cache, by the paper's protocol and by the release's."""
    numbers = reference(method)[length]
    model, _ = load_model(checkpoints(method), iteration=300)
    protocols = ["non-overlapping", "kerple@1"]
    keys = {"protocols": protocols, "query_chunk": 16, "progress": False}
    first, second = (evaluate_extrapolation(model, stream_of(numbers, row), [length], **keys) for row in range(2))
    for place, protocol in enumerate(protocols):
        loss = (first[place]["loss"] + second[place]["loss"]) / 2
        assert loss == pytest.approx(float(numbers["loss"]), abs=1e-5), protocol


def test_learned_positions_are_not_available_beyond_the_training_length():
    model, _ = load_model(checkpoints("learned"), iteration=300)
    stream = stream_of(reference("none")[128], 0)
    within, beyond = evaluate_extrapolation(model, stream, [32, 128], progress=False)
    assert within["loss"] > 0
    assert beyond["loss"] is None
    assert "32" in beyond["note"]


@pytest.mark.parametrize("length", [32, 128])
def test_the_release_s_protocol_on_its_own_predictions(length):
    """Both of its texts as one stream, two segments: losses from the logits that the release computed."""
    numbers = reference("kerple_log")[length]
    stream = torch.cat((numbers["tokens"].flatten(), numbers["labels"][-1, -1:])).long()
    losses = direct_losses(numbers["logits"], stream[1:].view(2, length))
    model, _ = load_model(checkpoints("kerple_log"), iteration=300)
    for protocol, expected in (("kerple@1", losses[0]), ("kerple@2", losses)):
        (row,) = evaluate_extrapolation(model, stream, [length], protocols=[protocol], query_chunk=16, progress=False)
        assert (row["protocol"], row["segments"], row["tokens"]) == (
            protocol,
            expected.numel() // length,
            expected.numel(),
        )
        assert row["loss"] == pytest.approx(expected.mean().item(), abs=1e-5)
