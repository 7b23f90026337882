"""Sandwich against inner products of sinusoidal embeddings, as in the paper."""

import numpy as np
import pytest
import torch

from kerple.positional import Sandwich


@pytest.mark.parametrize(("heads", "dimensions", "base"), [(12, 128, 10_000.0), (3, 6, 500.0)])
def test_bias_is_the_inner_product_of_two_positions(heads, dimensions, base):
    method = Sandwich(heads, dimensions, base).bfloat16()
    positions = np.array([0, 1, 2, 3, 40, 511, 2048, 65_536], dtype=np.float64)
    angles = positions[:, None] / base ** (2 * np.arange(dimensions // 2) / dimensions)
    embedding = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    ratio = np.arange(1, heads + 1) * 8 / heads
    expected = (embedding @ embedding.T) / ratio[:, None, None]
    # Up to a constant per head, which the softmax cancels.
    expected = expected - expected[:, :1, :1]
    distance = torch.tensor(np.abs(positions[:, None] - positions), dtype=torch.float32)
    bias = method.bias(distance)
    assert bias.dtype == torch.float32
    np.testing.assert_allclose(bias.double(), expected, rtol=1e-6, atol=1e-6 * dimensions)
    assert (bias[:, 0, 0] == 0).all()
    assert not method.state_dict()


def test_long_tables_are_computed_in_chunks():
    method = Sandwich(4)
    table = method.bias(torch.arange(10_000.0))
    assert torch.equal(table[:, 9000:], method.bias(torch.arange(9000.0, 10_000.0)))
