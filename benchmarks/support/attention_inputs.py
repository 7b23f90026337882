"""Inputs of the attention benchmarks, for CPU and GPU.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention import Attention, PositionTables, position_tables, prepare_tables
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
    return (
        query.requires_grad_(train),
        key.requires_grad_(train),
        value.requires_grad_(train),
        upstream,
    )


def attend_with_method(
    method: PositionalMethod,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    backend: str,
    window: int | None = None,
) -> Tensor:
    """Attention as in a model's layer: rotates, evaluates the tables, then runs the backend."""
    return Attention(method, backend)(query, key, value, window=window)


def layer_tables(
    method: PositionalMethod, length: int, heads: int, device: torch.device, backend: str
) -> PositionTables:
    """The method's tables as all layers of a model share them in training."""
    if backend != "fused":
        return position_tables(method, length, device)
    return prepare_tables(
        position_tables(method, length, device, with_jacobians=True), heads, length, device
    )


def as_leaves(tables: PositionTables) -> tuple[PositionTables, list[Tensor]]:
    """The same tables without the graph of the method's parameters, and the tensors that get their
    gradients.
    """
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.requires_grad:
            return tensor
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1]

    # The kernels have tables and coefficients of their own.
    if tables.kernel is None:
        return replace(tables, bias=leaf(tables.bias), weight=leaf(tables.weight)), leaves
    bias, weight, of_bias, of_weight = map(leaf, tables.kernel[:4])
    kernel = tables.kernel._replace(
        bias_table=bias,
        weight_table=weight,
        bias_coefficients=of_bias,
        weight_coefficients=of_weight,
    )
    return replace(tables, kernel=kernel), leaves
