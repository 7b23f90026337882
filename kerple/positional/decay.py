"""The bias of methods whose tokens decay the attention to all earlier tokens, as additional dimensions of the heads.

With the decay f_k of token k (a negative number per head, computed from its hidden state), the bias is

    bias_ij = sum of f_k for k = j+1 ... i = c_i - c_j,    with the prefix sums c

A difference of a number of the query and one of the key is part of a dot product. So queries and keys get dimensions
that contain c, and dimensions with a constant that meet them. Every attention backend computes such a bias, with any
span of keys, and a KV cache stores it with the keys.

Legend: b batch, s tokens, h heads, g heads of keys and values (`group` = h/g query heads share one), d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# A power of two. In float16 the prefix sums may reach 65,504 * FACTOR / sqrt(d).
FACTOR = 256.0
# A prefix sum is stored as the sum of this many numbers, so that it has at least 32 significant bits (float64: 53).
PARTS = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}


def extra_dimensions(dtype: torch.dtype, group: int) -> int:
    """The number of dimensions that `append_decay` adds."""
    return PARTS[dtype] * (group + 1)


def append_decay(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, scale: float, last_key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value with the `extra_dimensions` of the bias; those of the value are zero.

    Attention must multiply the products by `scale`, that of the head size before. Its result has the additional
    dimensions too; remove them with `context[..., :d]`.

    Args:
        query: `[b, h, s, d]`. key, value: `[b, g, s, d]`, of the same tokens.
        decay: `[b, h, s]`, by each of these tokens.
        scale: factor of q.k.
        last_key: `[b, g, 1, d + extra]`, the key before these from an earlier call; None if they are the first.
    """
    group, head_size, parts = query.shape[1] // key.shape[1], query.shape[3], PARTS[key.dtype]
    # Long sums of large decays would lose the differences of near tokens in float32. MPS has no float64.
    exact = torch.float32 if key.device.type == "mps" else torch.float64
    sums = decay.to(exact).cumsum(dim=-1) / (scale * FACTOR)
    if last_key is not None:
        columns = last_key[..., head_size : head_size + group * parts].to(exact).unflatten(-1, (group, parts))
        sums = sums - columns.sum(dim=-1).squeeze(2).flatten(1)[..., None]
    by_kv_head = sums.unflatten(1, (-1, group)).transpose(2, 3)  # [b, g, s, group]
    key_columns = _split(-by_kv_head, key.dtype, parts).flatten(-2)
    # The softmax cancels the number of the query, so its gradient is zero.
    query_columns = _split(sums.detach(), query.dtype, parts)
    own = torch.eye(group, dtype=query.dtype, device=query.device).repeat_interleave(parts, dim=1) * FACTOR
    own = own.repeat(key.shape[1], 1)[None, :, None].expand(*query.shape[:3], -1)
    constant = key.new_full((1,), FACTOR).expand(*key.shape[:3], parts)
    return (
        torch.cat((query, own, query_columns), dim=-1),
        torch.cat((key, key_columns, constant), dim=-1),
        F.pad(value, (0, extra_dimensions(key.dtype, group))),
    )


def _split(numbers: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """`[..., parts]` whose sums are the numbers; the gradient goes through the first part."""
    split = []
    for _ in range(parts):
        split.append(numbers.to(dtype))
        numbers = numbers.detach() - split[-1].detach()
    return torch.stack(split, dim=-1)
