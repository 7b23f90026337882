"""Sandwich against inner products of sinusoidal embeddings, as in the paper."""

import numpy as np
import pytest
import torch

from kerple.positional import Sandwich


@pytest.mark.parametrize(("heads", "dimensions", "base"), [(12, 128, 10_000.0), (3, 6, 500.0)])
def test_bias_is_the_inner_product_of_two_positions(heads, dimensions, base):
    method = Sandwich(heads, dimensions, base).bfloat16()
    assert not method.state_dict()
    positions = np.array([0, 1, 2, 3, 40, 511, 2048, 65_536], dtype=np.float64)
    distance = np.abs(positions[:, None] - positions)
    bias = method.bias(torch.from_numpy(distance).float())
    assert bias.dtype == torch.float32

    # The embeddings of the positions: [n, dimensions].
    frequencies = base ** (-2 * np.arange(dimensions // 2) / dimensions)
    angles = np.outer(positions, frequencies)
    embedding = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    # Their inner products, divided by a ratio per head, up to a constant per head, which the
    # softmax cancels: [h, n, n].
    ratio = np.arange(1, heads + 1) * 8 / heads
    products = embedding @ embedding.T
    expected = (products - products[0, 0]) / ratio[:, None, None]
    np.testing.assert_allclose(bias.double(), expected, rtol=1e-6, atol=1e-6 * dimensions)
    assert (bias[:, 0, 0] == 0).all()


def test_long_tables_are_computed_in_chunks():
    method = Sandwich(4)
    distances = torch.arange(10_000.0)
    table = method.bias(distances)
    assert torch.equal(table[:, 9000:], method.bias(distances[9000:]))
