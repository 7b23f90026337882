"""FIRE against the paper's formula, pair by pair in float64."""

import math

import pytest
import torch

from kerple.positional import Chunk, Fire
from tests.support.attention import assert_is_formula


def fire_bias(method, length: int, activation=torch.relu) -> torch.Tensor:
    """`[h, t, t]`; values above the diagonal are not used."""
    rows = []
    for i in range(length):
        top = torch.maximum(
            torch.tensor([float(i)], dtype=torch.float64), (method.m * method.threshold).abs()
        )
        below = torch.log((method.c * top).abs() + 1) + 1e-6
        ratios = [torch.log((method.c * (i - j)).abs() + 1) / below for j in range(length)]
        hidden = [
            activation(method.first.weight[:, 0] * ratio + method.first.bias) for ratio in ratios
        ]
        rows.append(
            torch.stack(
                [method.second.weight @ units + method.second.bias for units in hidden], dim=-1
            )
        )
    return torch.stack(rows, dim=-2)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("threshold", [8.0, 512.0])
def test_values_and_gradients(threshold):
    torch.manual_seed(0)
    method = Fire(3, mlp_width=7, threshold=threshold).double()

    def scores(query, key, visible):
        return query @ key.transpose(-1, -2) / math.sqrt(4) + fire_bias(method, key.shape[2])

    if threshold == 512.0:  # below it, the bias depends only on the distance
        bias = fire_bias(method, 30)
        torch.testing.assert_close(bias[:, 20, 15], bias[:, 25, 20])
    assert_is_formula(method, scores, 3, 4)


def test_a_key_after_the_query_takes_its_place():
    torch.manual_seed(0)
    method, positions = Fire(3, threshold=2.0).double(), torch.arange(9)
    like = torch.zeros((), dtype=torch.float64)
    causal = method.pair_bias(positions, positions, like)
    expected = torch.where(positions[:, None] >= positions, causal, causal.transpose(1, 2))
    torch.testing.assert_close(method.pair_bias(positions, positions, like, causal=False), expected)


def test_signs_of_c_and_m():
    """Training may change them; the formula has their absolute values."""
    torch.manual_seed(0)
    method, positions = Fire(3, threshold=2.0), torch.arange(9)
    expected = method.pair_bias(positions, positions, torch.zeros(()))
    for parameter in (method.c, method.m):
        parameter.data.neg_()
    assert torch.equal(method.pair_bias(positions, positions, torch.zeros(())), expected)


def test_mapped_distances():
    """Halves of all distances, also of that to the first token, are half of c and twice L."""
    torch.manual_seed(0)
    method, positions = Fire(3, threshold=2.0).double(), torch.arange(9)
    scores, mask = torch.zeros(1, 3, 9, 9).double(), positions > positions[:, None]
    mapped = torch.arange(9) / 2
    chunk = Chunk(scores, scores, positions, positions, mask, mapped)
    found = method.modify_scores(chunk)[0]
    method.c.data /= 2
    method.threshold *= 2
    expected = method.pair_bias(positions, positions, scores)
    torch.testing.assert_close(found.tril(), expected.tril())


def test_initial_values():
    method = Fire(12)
    assert method.c.tolist() == pytest.approx([0.1])
    assert method.m.tolist() == [1.0]
    assert method.first.weight.shape == (32, 1)
    assert not method.shared


def test_positions_to_65_536_in_half_precision():
    """Computed in float32 from bfloat16 parameters, whatever the states' dtype."""
    torch.manual_seed(0)
    method = Fire(2).bfloat16()
    query, key = torch.arange(65_530, 65_536), torch.arange(65_536)
    actual = method.pair_bias(query, key, torch.zeros((), dtype=torch.float32))
    exact = method.double().pair_bias(query, key, torch.zeros((), dtype=torch.float64))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=1e-6)
