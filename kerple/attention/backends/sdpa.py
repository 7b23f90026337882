"""The sdpa backend: `torch.nn.functional.scaled_dot_product_attention`, with the bias in its mask.

`cpu_kernel_forward` is the forward pass of the chunked backend on a CPU, if it needs no weight.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, v size of
the value heads; in a chunk: c queries, l keys.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import Backend
from kerple.attention.backends.chunk_plan import ChunkPlan
from kerple.attention.backends.chunk_scores import masked_bias
from kerple.attention.call import AttentionCall
from kerple.attention.tables import lookup

# Queries per call of PyTorch's kernel if it needs a mask: bounds the memory of the mask.
MASK_ROWS = 128
# Queries per call of PyTorch's CPU kernel with a view as its mask. It is slower for fewer.
KERNEL_ROWS = 256
# The largest head size of FlashAttention's CUDA kernels.
MAX_FLASH_SIZE = 256


def sdpa_attention(call: AttentionCall) -> Tensor:
    """Like `attend`, without a weight.

    If PyTorch's causal mask, or none, is not enough, each chunk of queries gets a mask that
    contains the bias. So `[b, h, s, t]` is never in memory, unless autograd saves the masks. On a
    GPU the mask must have the query's dtype, which rounds the bias.
    """
    if call.tables.bias is None and call.is_plain and not call.has_pair_mask:
        return _attend(call, call.query, call.key, call.value, is_causal=call.span.causal)
    # A loop over an unknown length would be another graph for each length.
    if torch.compiler.is_compiling():
        return _attend_with_mask(call, 0, call.q_len)
    # The masks of some queries at a time.
    contexts = []
    for first in range(0, call.q_len, MASK_ROWS):
        last = min(first + MASK_ROWS, call.q_len)
        contexts.append(_attend_with_mask(call, first, last))
    return torch.cat(contexts, dim=2)


def _attend_with_mask(call: AttentionCall, first: int, last: int) -> Tensor:
    """The queries `first` ... last-1, with a mask that contains the bias: `[b, h, c, v]`."""
    query = call.query[:, :, first:last]
    bias_table = call.tables.bias
    queries = slice(call.offset + first, call.offset + last)
    keys = call.keys(queries)
    mask = call.mask(queries, keys)
    if bias_table is None:
        attn_mask = ~mask
    else:
        mask_dtype = query.dtype
        if query.device.type == "cpu":
            mask_dtype = call.compute_dtype
        bias = lookup(bias_table, call.distances(queries, keys))
        attn_mask = bias.masked_fill(mask, float("-inf")).to(mask_dtype)
        if attn_mask.dim() == 3:  # [h, c, l]
            attn_mask = attn_mask[None]
    return _attend(call, query, call.key[:, :, keys], call.value[:, :, keys], attn_mask=attn_mask)


def _attend(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """PyTorch's kernel for some of a call's queries and keys, and a mask `[s, t]` or
    `[b or 1, h or 1, s, t]`.
    """
    attend = partial(
        F.scaled_dot_product_attention,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.scale,
    )
    if call.queries_per_kv == 1:
        return attend(query, key, value, attn_mask)
    if _supports_gqa(query, attn_mask):
        return attend(query, key, value, attn_mask, enable_gqa=True)
    # A call for the first query head of each key/value head, one for the second, and so on.
    group = (call.kv_heads, call.queries_per_kv)
    queries = query.unflatten(1, group).unbind(2)
    if attn_mask is None or attn_mask.dim() == 2 or attn_mask.shape[1] == 1:
        masks = [attn_mask] * len(queries)
    else:
        masks = attn_mask.unflatten(1, group).unbind(2)
    contexts = [attend(part, key, value, mask) for part, mask in zip(queries, masks, strict=True)]
    return torch.stack(contexts, dim=2).flatten(1, 2)


def _supports_gqa(query: Tensor, attn_mask: Tensor | None) -> bool:
    """Whether a kernel of PyTorch shares key/value heads between query heads. On a GPU, only
    FlashAttention does; for other calls with `enable_gqa`, PyTorch repeats keys and values and
    stores all scores.
    """
    if query.device.type == "cpu":
        return True
    return attn_mask is None and query.dtype.itemsize == 2 and query.shape[3] <= MAX_FLASH_SIZE


def fits_cpu_kernel(call: AttentionCall) -> bool:
    """Whether PyTorch's CPU kernel computes a call: without weight and dropout, and with heads of
    one size.
    """
    on_cpu = call.query.device.type == "cpu"
    is_square = call.query.shape[3] == call.value.shape[3]
    return on_cpu and is_square and call.tables.weight is None and not call.dropout_p


def cpu_kernel_forward(call: AttentionCall) -> Tensor:
    """The context `[b, h, s, v]` of a causal call that `fits_cpu_kernel`, without gradients. The
    mask is a view of the table, so neither scores nor biases of pairs are in memory.
    """
    # All heads of a chunk at once, and more queries.
    plan = ChunkPlan.for_call(call)
    rows = max(plan.rows, min(call.q_len // 2, KERNEL_ROWS))
    plan = replace(plan, merges_samples=False, group_size=plan.heads, rows=rows)
    like = call.query.new_empty(0, dtype=call.compute_dtype)
    table = masked_bias(plan, call, like)
    context = plan.empty_context(call.query, call.value.shape[3])
    for chunk in plan.chunks:
        # The queries of a chunk are in reverse order, as its view requires.
        query = call.query.narrow(2, chunk.first_query, chunk.rows).flip(2)
        key = call.key.narrow(2, chunk.first_key, chunk.keys)
        value = call.value.narrow(2, chunk.first_key, chunk.keys)
        mask = table.values(0, chunk.rows, chunk.keys)  # [h or 1, c, l]
        part = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[None], scale=call.scale, enable_gqa=True
        )
        context.narrow(2, chunk.first_query, chunk.rows).copy_(part.flip(2))
    return context


SDPA = Backend("sdpa", sdpa_attention, weight=False)
