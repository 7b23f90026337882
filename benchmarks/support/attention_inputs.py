"""Inputs of the attention benchmarks, for CPU and GPU.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
from torch import Tensor

from kerple.attention import Attention
from kerple.positional import PositionalMethod


def random_states(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    train: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query `[b, h, s, d]`, key and value `[b, h, t, d]`, and an upstream gradient `[b, h, s, d]`.

    They have the memory layout of a model: heads are inside positions.
    """
    torch.manual_seed(0)
    shapes = [(batch, length, heads, head_size) for length in (queries, keys, keys, queries)]
    states = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    query, key, value, upstream = (part.transpose(1, 2) for part in states)
    return query.requires_grad_(train), key.requires_grad_(train), value.requires_grad_(train), upstream


def attend_with_method(
    method: PositionalMethod, query: Tensor, key: Tensor, value: Tensor, *, backend: str, window: int | None = None
) -> Tensor:
    """Attention as in a model's layer: rotates, evaluates the method's tables, then runs the backend."""
    return Attention(method, backend)(query, key, value, window=window)
