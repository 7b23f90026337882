"""The reference backend against the definition of attention, pair by pair."""

import math

import pytest
import torch

from kerple.attention import attend
from tests.support.attention import LargestStorage, attend_arguments


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("method", ["none", "kerple_log", "kerple_power_ap_ap"])
def test_it_follows_the_definition(method, window, kv_heads):
    """softmax(weight * q.k / sqrt(d) + bias) v, for queries that are the last positions."""
    arguments = attend_arguments(
        method, batch=2, heads=4, s=4, t=9, size=3, window=window, kv_heads=kv_heads
    )
    query, key, value, bias, weight, _ = arguments.values()
    actual = attend(backend="reference", **arguments)
    for b in range(2):
        for h in range(4):
            kv_head = h // (4 // kv_heads)
            for i in range(4):
                position = 9 - 4 + i
                visible = [
                    j
                    for j in range(9)
                    if j <= position and (window is None or position - j < window)
                ]
                scores = []
                for j in visible:
                    score = (query[b, h, i] @ key[b, kv_head, j]).item() / math.sqrt(3)
                    score *= 1.0 if weight is None else weight[h, position - j].item()
                    scores.append(score + (0.0 if bias is None else bias[h, position - j].item()))
                total = sum(math.exp(score) for score in scores)
                probabilities = [math.exp(score) / total for score in scores]
                expected = sum(
                    p * value[b, kv_head, j] for p, j in zip(probabilities, visible, strict=True)
                )
                torch.testing.assert_close(actual[b, h, i], expected, rtol=1e-10, atol=1e-12)


def test_it_has_all_scores_in_memory():
    """This validates the memory tests of the other backends."""
    query, key = torch.randn(1, 2, 512, 8), torch.randn(1, 2, 4096, 8)
    with LargestStorage() as largest:
        attend(query, key, key, backend="reference")
    assert largest.elements >= 2 * 512 * 4096
