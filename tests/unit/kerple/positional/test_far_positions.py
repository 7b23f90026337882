"""Every method in half precision at the end of a text of 65,536 tokens, against itself in float32."""

import copy

import pytest
import torch

from kerple.attention import Attention, score_table, tables
from kerple.positional import ModelShape, PositionalMethod, build, primary_names

LENGTH, LAST = 65_536, 4
HEADS, SIZE = 2, 8
SHAPE = ModelShape(HEADS, SIZE, HEADS * SIZE, num_layers=1, max_positions=LENGTH)


@torch.no_grad()
def attended(method: PositionalMethod, hidden: torch.Tensor) -> torch.Tensor:
    """The last queries of hidden `[3, t, h d]`, one for each of query, key and value."""
    positions = torch.arange(LENGTH)
    placed = method.embed(hidden, positions).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    query, key, value = placed.unsqueeze(1).unbind(0)
    query, _ = method.rotate(query[:, :, -LAST:], key[:, :, :0], positions[-LAST:], positions[:0])
    _, key = method.rotate(query[:, :, :0], key, positions[:0], positions)
    bias, weight = tables(method, LENGTH, "cpu")
    table = score_table(method, LENGTH, "cpu") if method.modifies_scores else None
    return Attention("auto", method)(query, key, value, bias_table=bias, weight_table=weight, table=table)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", primary_names())
def test_half_precision_is_close_to_float32(name, dtype, tolerance):
    torch.manual_seed(0)
    method = build(name, SHAPE).to(dtype)
    hidden = torch.randn(3, LENGTH, HEADS * SIZE).to(dtype)
    expected = attended(copy.deepcopy(method).float(), hidden.float())
    found = attended(method, hidden)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= tolerance * expected.norm()
