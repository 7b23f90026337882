"""PyTorch's FlexAttention, with bias and weight as a `score_mod` over tables.

On a GPU it is compiled, and sums the tables' gradients with atomics: a second run may differ in their last bits. On a
CPU it is not compiled and has no backward pass.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kerple.attention.score_mod import table_score_mod


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    window: int | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """As `attend`. Raises NotImplementedError for dropout, and for gradients on a CPU."""
    if dropout_p:
        raise NotImplementedError("attention-backend 'flex' has no attention dropout; use auto, chunked or reference")
    states = (query, key, value, bias_table, weight_table)
    wants_gradient = any(tensor is not None and tensor.requires_grad for tensor in states)
    if query.device.type == "cpu" and wants_gradient and torch.is_grad_enabled():
        raise NotImplementedError(
            "attention-backend 'flex' cannot train on a CPU (PyTorch's FlexAttention has no backward pass there); "
            "use auto or chunked"
        )
    s, t = query.shape[2], key.shape[2]
    modify = None
    if bias_table is not None or weight_table is not None:
        modify = table_score_mod(bias_table, weight_table, t - s)
    run = _compiled() if query.device.type == "cuda" else _flex().flex_attention
    mask = _block_mask(s, t, window, query.device)
    return run(query, key, value, score_mod=modify, block_mask=mask, scale=scale)


def _flex():
    import torch.nn.attention.flex_attention as flex

    return flex


@lru_cache(maxsize=1)
def _compiled():
    return torch.compile(_flex().flex_attention, dynamic=False)


@lru_cache(maxsize=64)
def _block_mask(s: int, t: int, window: int | None, device: torch.device):
    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + (t - s) - key
        near = distance >= 0
        return near if window is None else near & (distance < window)

    return _flex().create_block_mask(seen, None, None, s, t, device=device)
