"""Llama-style models train like transformers' own implementations: the same weights, data and
optimizer in float32.
"""

import pytest
import torch

from megatron.convert import from_hugging_face
from megatron.inference import load_model
from tests.support.checkpoints import TRAIN_LENGTH
from tests.support.conversion import quiet
from tests.support.families import family_model

STEPS = 20


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama with grouped queries",
        "llama with biases",
        "mistral",
        "qwen3",
        "qwen2 with window",
    ],
)
@pytest.mark.quick(3)
def test_losses_are_those_of_transformers(family, tmp_path):
    theirs = family_model(tmp_path / "theirs", family, initializer_range=0.02).train()
    from_hugging_face(tmp_path / "theirs", tmp_path / "ours", with_tokenizer=False, report=quiet)
    ours = load_model(tmp_path / "ours")[0].train()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.005) for model in (ours, theirs)]
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        # A random walk can be predicted from the context.
        tokens = (torch.randint(-2, 3, (4, TRAIN_LENGTH)).cumsum(1) + 32) % 64
        pair = (ours.loss(tokens[:, :-1], tokens[:, 1:]), theirs(tokens, labels=tokens).loss)
        for loss, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((pair[0].item(), pair[1].item()))
    assert losses[-1][0] < losses[0][0] - 0.3
    for ours_, theirs_ in losses:
        assert ours_ == pytest.approx(theirs_, abs=1e-4)
