"""`torch.nn.functional.scaled_dot_product_attention`: whatever kernel PyTorch has for the case.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.tables import pair_distances

# Rows of a mask in memory at a time.
MASK_ROWS = 128


def sdpa_attention(
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
    """As `attend`, without a weight.

    PyTorch takes no table, so where its own causal mask does not do, a mask with the bias in it is made for some
    queries at a time: `[b, h, s, t]` is never in memory, unless autograd keeps it. On a GPU the mask must have the
    query's dtype, to which it rounds the bias.
    """
    s, t = query.shape[2], key.shape[2]
    if bias_table is None and window is None and s == t:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, is_causal=True, scale=scale)
    on_cpu = query.device.type == "cpu"
    mask_dtype = torch.promote_types(query.dtype, torch.float32) if on_cpu else query.dtype
    chunks = []
    for first in range(0, s, MASK_ROWS):
        last = min(first + MASK_ROWS, s)
        end = t - s + last
        begin = 0 if window is None else max(0, t - s + first - window + 1)
        distance, unseen = pair_distances((t - s + first, end), (begin, end), window, query.device)
        if bias_table is None:
            mask = ~unseen
        else:
            mask = bias_table[:, distance].masked_fill(unseen, float("-inf")).to(mask_dtype)[None]
        chunks.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, begin:end],
                value[:, :, begin:end],
                attn_mask=mask,
                dropout_p=dropout_p,
                scale=scale,
            )
        )
    return torch.cat(chunks, dim=2)
