"""Losses that the original KERPLE code computed, measured by evaluate_extrapolation."""

import pytest
import torch

from megatron.evaluation import evaluate_extrapolation
from megatron.inference import load_model
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
