"""Inputs of the attention benchmarks, for CPU and GPU.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kerple.attention import PositionTables, position_tables, prepare_tables
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

    def states(length: int) -> Tensor:
        shape = batch, length, heads, head_size
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2)

    query = states(queries).requires_grad_(train)
    key = states(keys).requires_grad_(train)
    value = states(keys).requires_grad_(train)
    upstream = states(queries)
    return query, key, value, upstream


def gradient_step(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor | None
) -> Callable[[], object]:
    """A forward and backward pass, which computes the gradients of the leaves. upstream: None if
    the forward pass returns a scalar.
    """
    return lambda: torch.autograd.grad(forward(), leaves, upstream)


def layer_tables(
    method: PositionalMethod, length: int, heads: int, device: torch.device, backend: str
) -> PositionTables:
    """The method's tables as all layers of a model share them in training."""
    if backend != "fused":
        return position_tables(method, length, device)
    tables = position_tables(method, length, device, with_jacobians=True)
    return prepare_tables(tables, heads, length, device)


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
        shared = replace(tables, bias=leaf(tables.bias), weight=leaf(tables.weight))
        return shared, leaves
    bias, weight, of_bias, of_weight = map(leaf, tables.kernel[:4])
    kernel = tables.kernel._replace(
        bias_table=bias,
        weight_table=weight,
        bias_coefficients=of_bias,
        weight_coefficients=of_weight,
    )
    return replace(tables, kernel=kernel), leaves
