"""The forward pass: a program takes a tile of queries past the keys they see, with an online softmax.

Legend: b batch, h heads, s query length, t key length, d head size.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.tiles import key_ranges, load_rows, store_rows, tile_scores


@triton.jit
def forward_kernel(
    query, key, value, bias, weight, context, log_sum,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, context_b, context_h, context_s,
    table_h, heads, s, t, scale_log2, window,
    SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """context `[b, h, s, d]`, and log_sum `[b, h, s]`: the softmax's denominator as a logarithm to base 2."""
    # The longest rows first: the short ones fill the gaps at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query += sample * query_b + head * query_h
    key += sample * key_b + head * key_h
    value += sample * value_b + head * value_h
    context += sample * context_b + head * context_h
    log_sum += (sample * heads + head) * s
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    offset = t - s

    queries = load_rows(query, first, query_s, s, SIZE, BLOCK_M, BLOCK_D)
    gathered = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, full, part, end = key_ranges(first, offset, t, window, HAS_WINDOW, BLOCK_M, BLOCK_N)
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_N):
        keys = load_rows(key, start, key_t, t, SIZE, BLOCK_N, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, _ = tile_scores(
            products, offset + first - start, (start < full) | (start >= part), bias, weight, scale_log2,
            HAS_TABLE, HAS_WEIGHT, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        raised = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet, at a window's far edge, has no highest score to subtract.
        reference = tl.where(raised == float("-inf"), 0.0, raised)
        factor = tl.exp2(highest - reference)
        probabilities = tl.exp2(scores - reference[:, None])
        total = total * factor + tl.sum(probabilities, 1)
        gathered = gathered * factor[:, None]
        values = load_rows(value, start, value_t, t, SIZE, BLOCK_N, BLOCK_D)
        gathered = tl.dot(probabilities.to(values.dtype), values, gathered, input_precision=PRECISION)
        highest = raised
    # Rows of no query may have seen nothing.
    total = tl.where(total == 0.0, 1.0, total)
    store_rows(context, first, context_s, s, gathered / total[:, None], SIZE, BLOCK_M, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(log_sum + rows, highest + tl.log2(total), mask=rows < s)
