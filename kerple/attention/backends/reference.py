"""The reference backend: all scores in memory, in float32 (float64 for float64 inputs).

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size; in a chunk:
c queries, l keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kerple.attention.backend import Backend
from kerple.attention.call import AttentionCall
from kerple.attention.tables import lookup
from kerple.positional import Chunk


def reference_attention(call: AttentionCall) -> Tensor:
    """Like `attend`, with `[b, h, s, t]` scores in memory."""
    first_key = 0
    if call.modify_scores is not None:
        first_key = call.keys(slice(call.offset, call.offset + call.q_len)).start
    key = call.key[:, :, first_key:]
    value = call.value[:, :, first_key:]
    return attend_to_chunk(
        call.query,
        key,
        value,
        call.tables.scores,
        call=call,
        first_query=call.offset,
        first_key=first_key,
    )


def attend_to_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_table: Tensor | None,
    *,
    call: AttentionCall,
    first_query: int,
    first_key: int,
) -> Tensor:
    """Attention of `[b, h, c, d]` queries and `[b, g, l, d]` keys at consecutive positions, with
    all their scores in memory. `call` says how scores are computed.
    """
    # Positions.
    queries = slice(first_query, first_query + query.shape[2])
    keys = slice(first_key, first_key + key.shape[2])
    query_positions = torch.arange(queries.start, queries.stop, device="cpu") + call.dropped
    key_positions = torch.arange(keys.start, keys.stop, device="cpu") + call.dropped

    # Contiguous for `baddbmm`, which multiplies by the scale for free; `@` would copy them once
    # more.
    dtype = call.compute_dtype
    layout = torch.contiguous_format
    exact_query = query.to(dtype, memory_format=layout)
    exact_key = key.to(dtype, memory_format=layout)
    flat_key = exact_key.flatten(0, 1)  # [b g, l, d]
    flat_value = value.to(dtype, memory_format=layout).flatten(0, 1)  # [b g, l, v]

    # The queries of all heads that share a key/value head are the rows of one matrix.
    group_rows = call.queries_per_kv * query.shape[2]
    if call.products is None:
        flat_query = exact_query.reshape(len(flat_key), group_rows, query.shape[3])
        columns = flat_key.transpose(1, 2)  # [b g, d, l]
        unused = flat_query.new_empty(())
        scores = torch.baddbmm(unused, flat_query, columns, beta=0, alpha=call.scale)
        scores = scores.view(*query.shape[:3], key.shape[2])  # [b, h, c, l]
    else:
        scores = call.products(exact_query, exact_key, query_positions, key_positions, call.scale)

    # The method's own scores, or bias and weight by distance.
    mask = call.mask(queries, keys)
    if call.modify_scores is not None:
        chunk = Chunk(
            scores=scores,
            query=query,
            query_positions=query_positions,
            key_positions=key_positions,
            mask=mask,
            table=score_table,
            causal=call.span.causal,
        )
        scores = call.modify_scores(chunk)
    elif call.has_tables:
        distance = call.distances(queries, keys)
        if call.tables.weight is not None:
            scores = scores * lookup(call.tables.weight, distance)
        if call.tables.bias is not None:
            scores = scores + lookup(call.tables.bias, distance)
    scores = scores.masked_fill(mask, float("-inf"))

    # Only a key mask or a bias can hide every key from a query.
    if call.key_mask is None and call.tables.bias is None:
        probabilities = scores.softmax(dim=-1)
    else:
        probabilities = softmax_or_zero(scores)
    probabilities = F.dropout(probabilities, call.dropout_p)
    probabilities = probabilities.reshape(len(flat_key), group_rows, key.shape[2])
    context = torch.bmm(probabilities, flat_value)
    context = context.view(*query.shape[:3], value.shape[3])  # [b, h, c, v]
    return context.to(query.dtype)


def softmax_or_zero(scores: Tensor) -> Tensor:
    """The softmax over the last dimension; zero for rows that are -inf everywhere, which have no
    visible key.
    """
    is_empty = scores.amax(dim=-1, keepdim=True) == float("-inf")
    return scores.masked_fill(is_empty, 0.0).softmax(dim=-1).masked_fill(is_empty, 0.0)


REFERENCE = Backend("reference", reference_attention, modify_scores=True)
