"""The sdpa backend: `torch.nn.functional.scaled_dot_product_attention`, with the bias in its mask.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.call import AttentionCall, Backend
from kerple.attention.tables import pair_distances

# Queries per call of PyTorch's kernel if it needs a mask: bounds the memory of the mask.
MASK_ROWS = 128


def sdpa_attention(call: AttentionCall) -> Tensor:
    """Like `attend`, without a weight.

    If PyTorch's causal mask is not enough, each chunk of queries gets a mask that contains the bias. So `[b, h, s, t]`
    is never in memory, unless autograd saves the masks. On a GPU the mask must have the query's dtype, which rounds the
    bias.
    """
    query, key, value, bias_table = call.query, call.key, call.value, call.bias_table
    if bias_table is None and call.span.window is None and call.q_len == call.kv_len:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=call.dropout_p, is_causal=True, scale=call.scale
        )
    mask_dtype = call.compute_dtype if query.device.type == "cpu" else query.dtype
    contexts = []
    for first in range(0, call.q_len, MASK_ROWS):
        last = min(first + MASK_ROWS, call.q_len)
        first_key, end = call.span.first_key(call.offset + first), call.offset + last
        queries, keys = range(call.offset + first, end), range(first_key, end)
        mask = call.span.mask(queries, keys, query.device)
        if bias_table is None:
            attn_mask = ~mask
        else:
            bias = bias_table[:, pair_distances(queries, keys, mask)]
            attn_mask = bias.masked_fill(mask, float("-inf")).to(mask_dtype)[None]
        contexts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                key[:, :, first_key:end],
                value[:, :, first_key:end],
                attn_mask=attn_mask,
                dropout_p=call.dropout_p,
                scale=call.scale,
            )
        )
    return torch.cat(contexts, dim=2)


SDPA = Backend("sdpa", sdpa_attention, weight=False)
