"""The Triton kernels for the gradients of query, key, value and decay, and of the coefficients of
tables; see `kernels.py` for the conventions. Both recompute the probabilities of a tile.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.kernels import (
    input_pointers,
    key_ranges,
    query_base,
    round_up,
    sample_and_heads,
    tile_scores,
)
from kerple.attention.backends.triton.memory import (
    DECAY_BLOCK,
    load_base,
    load_decay,
    load_document_tile,
    load_row_stats,
    load_rows,
    look_up,
    store_rows,
    store_sums,
)


@triton.jit
def key_value_kernel(
    query, key, value, bias, weight, decay, bases, documents, grad_context, row_stats, grad_key,
    grad_value, column_sums,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    grad_context_b, grad_context_h, grad_context_s, grad_key_b, grad_key_h, grad_key_t,
    grad_value_b, grad_value_h, grad_value_t,
    table_h, decay_h, bases_h, row_stats_h, heads, group, s, t, scale, scale_log2, window,
    SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_DECAY: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_key and grad_value `[b, g, t, d]`; with a decay, also column_sums `[b, h, t]`: the sums
    of the scores' gradient over queries. A program computes a tile of keys, for which it adds up
    the gradients of all query heads in a fixed order. Its score tiles are transposed.
    """
    first = tl.program_id(0) * BLOCK_N
    sample, kv_head, _ = sample_and_heads(heads // group, 1)
    padded_sample = sample
    row_length, origin, place = t, 0, 0
    if HAS_DOCUMENTS:
        # The keys at the first positions, which most queries attend to, start first.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        sample, origin, s, place, first = load_document_tile(documents, index, BLOCK_N)
        t = s
        if first >= t:
            return
        query += origin * query_s
        key += origin * key_t
        value += origin * value_t
        grad_context += origin * grad_context_s
        grad_key += origin * grad_key_t
        grad_value += origin * grad_value_t
    key += sample * key_b + kv_head * key_h
    value += sample * value_b + kv_head * value_h
    grad_key += sample * grad_key_b + kv_head * grad_key_h
    grad_value += sample * grad_value_b + kv_head * grad_value_h
    offset = t - s

    keys = load_rows(key, first, key_t, t, SIZE, BLOCK_N, BLOCK_D)
    values = load_rows(value, first, value_t, t, SIZE, BLOCK_N, BLOCK_D)
    grad_key_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_value_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Queries in [begin, end) attend to some of the keys; those in [full, part) attend to all of
    # them.
    last = first + BLOCK_N - 1
    begin = tl.maximum(first - offset, 0) // BLOCK_M * BLOCK_M
    full = round_up(tl.maximum(last - offset, 0), BLOCK_M)
    part = s // BLOCK_M * BLOCK_M
    end = s
    if HAS_WINDOW:
        part = tl.minimum(part, tl.maximum(first + window - offset, 0) // BLOCK_M * BLOCK_M)
        end = tl.minimum(end, tl.maximum(last + window - offset, 0))
    # At least one tile, even if no query attends to the keys: in a loop that may not run, ptxas
    # waits for every matrix product separately.
    end = tl.maximum(end, begin + 1)
    tl.assume(begin < end)
    # One flattened loop over heads and queries: nested loops need more registers.
    for member in tl.range(0, group, flatten=True):
        head = kv_head * group + member
        head_query = query + sample * query_b + head * query_h
        head_bias = bias + head * table_h + MARGIN
        head_weight = weight + head * table_h + MARGIN
        head_grad_context = grad_context + sample * grad_context_b + head * grad_context_h
        padded_row = padded_sample * heads + head
        head_row_stats = row_stats + padded_row * row_stats_h + 2 * place
        if HAS_DECAY:
            head_bases = bases + padded_row * bases_h + place // DECAY_BLOCK
            head_decay = decay + padded_row * decay_h + MARGIN + place
            column_sum = tl.zeros([BLOCK_N], tl.float32)
        for start in range(begin, end, BLOCK_M):
            queries = load_rows(head_query, start, query_s, s, SIZE, BLOCK_M, BLOCK_D)
            lse, delta = load_row_stats(head_row_stats, start, BLOCK_M)
            products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            first_distance = offset + start - first
            if HAS_WINDOW:
                # If no query attends to the keys, stay within the margin.
                first_distance = tl.minimum(first_distance, window + BLOCK_N)
            scores, weights = tile_scores(
                products, first_distance, (start < full) | (start >= part), head_bias,
                head_weight, scale_log2, HAS_TABLE, HAS_WEIGHT, BLOCK_N, BLOCK_M, True,
            )  # fmt: skip
            if HAS_DECAY:
                # Loaded for each tile of queries, to save registers.
                shift = load_base(head_bases, first) - query_base(head_bases, offset, start)
                scores = scores - (load_decay(head_decay, first, BLOCK_N) + shift)[:, None]
            probabilities = tl.exp2(scores - lse[None, :])
            grad_contexts = load_rows(
                head_grad_context, start, grad_context_s, s, SIZE, BLOCK_M, BLOCK_D
            )
            grad_value_sum = tl.dot(
                probabilities.to(grad_contexts.dtype),
                grad_contexts,
                grad_value_sum,
                input_precision=PRECISION,
            )
            grad_scores = tl.dot(values, tl.trans(grad_contexts), input_precision=PRECISION)
            grad_scores = probabilities * (grad_scores - delta[None, :])
            if HAS_DECAY:
                column_sum += tl.sum(grad_scores, 1)
            if HAS_WEIGHT:
                grad_scores = grad_scores * weights
            grad_key_sum = tl.dot(
                grad_scores.to(queries.dtype), queries, grad_key_sum, input_precision=PRECISION
            )
        if HAS_DECAY:
            columns = first + tl.arange(0, BLOCK_N)
            store_sums(
                column_sums + (sample * heads + head) * row_length + origin + columns,
                column_sum,
                columns < t,
            )
    store_rows(grad_key, first, grad_key_t, t, grad_key_sum * scale, SIZE, BLOCK_N, BLOCK_D)
    store_rows(grad_value, first, grad_value_t, t, grad_value_sum, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def sum_along_direction(
    grad_scores, products, directions, INDEX: tl.constexpr, directions_p, first_distance,
    BIAS_DIRECTIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Per row, the sum of the scores' gradient times a direction of the bias, or, after those, one
    of the weight.
    """
    if INDEX >= BIAS_DIRECTIONS:
        grad_scores = grad_scores * products
    return tl.sum(
        grad_scores
        * look_up(directions + INDEX * directions_p, first_distance, ROWS, COLUMNS, False),
        1,
    )


@triton.jit
def query_kernel(
    query, key, value, bias, weight, decay, bases, documents, grad_context, row_stats, directions,
    grad_query, direction_sums, row_sums,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    grad_context_b, grad_context_h, grad_context_s, grad_query_b, grad_query_h, grad_query_s,
    table_h, decay_h, bases_h, row_stats_h, directions_p, heads, group, s, t, scale, scale_log2,
    window, SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_DECAY: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    BIAS_DIRECTIONS: tl.constexpr, WEIGHT_DIRECTIONS: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_query `[b, h, s, d]`, and direction_sums `[p, b, h, q]` for the gradients of the tables'
    coefficients; with a decay, also row_sums `[b, h, s]`: the sums of the scores' gradient over
    keys.

    A program computes a tile of queries. Its sums are, for each of the at most 4 directions
    `[p, h, ...]`, the scores' gradient times the direction, and for those of the weight, which come
    last, times q.k.
    """
    # The longest rows first. Packed documents have tiles and pointers of their own.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    sample, head, kv_head = sample_and_heads(heads, group)
    padded_row = sample * heads + head
    row_length, origin, place = s, 0, 0
    if HAS_DOCUMENTS:
        sample, origin, s, place, first = load_document_tile(documents, tl.program_id(0), BLOCK_M)
        t = s
        if first >= s:
            return
        query += origin * query_s
        key += origin * key_t
        value += origin * value_t
        grad_context += origin * grad_context_s
        grad_query += origin * grad_query_s

    # Pointers to this head.
    query, key, value, bias, weight = input_pointers(
        query, key, value, bias, weight,
        query_b, query_h, key_b, key_h, value_b, value_h, table_h, sample, head, kv_head, MARGIN,
    )  # fmt: skip
    grad_context += sample * grad_context_b + head * grad_context_h
    grad_query += sample * grad_query_b + head * grad_query_h
    row_stats += padded_row * row_stats_h + 2 * place
    directions += head * table_h + MARGIN
    offset = t - s

    # What all keys share.
    lse, delta = load_row_stats(row_stats, first, BLOCK_M)
    decay += padded_row * decay_h + MARGIN + place
    bases += padded_row * bases_h + place // DECAY_BLOCK
    base = 0.0
    if HAS_DECAY:
        base = query_base(bases, offset, first)
    queries = load_rows(query, first, query_s, s, SIZE, BLOCK_M, BLOCK_D)
    grad_contexts = load_rows(grad_context, first, grad_context_s, s, SIZE, BLOCK_M, BLOCK_D)
    grad_query_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_0 = tl.zeros([BLOCK_M], tl.float32)
    sum_1 = tl.zeros([BLOCK_M], tl.float32)
    sum_2 = tl.zeros([BLOCK_M], tl.float32)
    sum_3 = tl.zeros([BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # A tile of keys at a time, recomputing its probabilities.
    begin, full, part, end = key_ranges(first, offset, t, window, HAS_WINDOW, BLOCK_M, BLOCK_N)
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_N):
        keys = load_rows(key, start, key_t, t, SIZE, BLOCK_N, BLOCK_D)
        values = load_rows(value, start, value_t, t, SIZE, BLOCK_N, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        distance = offset + first - start
        scores, weights = tile_scores(
            products, distance, (start < full) | (start >= part), bias, weight, scale_log2,
            HAS_TABLE, HAS_WEIGHT, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        subtracted = lse
        if HAS_DECAY:
            scores = scores - load_decay(decay, start, BLOCK_N)[None, :]
            subtracted = lse + (load_base(bases, start) - base)
        probabilities = tl.exp2(scores - subtracted[:, None])

        # The scores' gradient.
        grad = tl.dot(grad_contexts, tl.trans(values), input_precision=PRECISION)
        grad = probabilities * (grad - delta[:, None])
        if HAS_DECAY:
            row_sum += tl.sum(grad, 1)

        # Sums for the tables' coefficients.
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 0:
            sum_0 += sum_along_direction(
                grad, products, directions, 0, directions_p, distance,
                BIAS_DIRECTIONS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 1:
            sum_1 += sum_along_direction(
                grad, products, directions, 1, directions_p, distance,
                BIAS_DIRECTIONS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 2:
            sum_2 += sum_along_direction(
                grad, products, directions, 2, directions_p, distance,
                BIAS_DIRECTIONS, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 3:
            sum_3 += sum_along_direction(
                grad, products, directions, 3, directions_p, distance,
                BIAS_DIRECTIONS, BLOCK_M, BLOCK_N,
            )  # fmt: skip

        # The gradient of the query, through q.k.
        if HAS_WEIGHT:
            grad = grad * weights
        grad_query_sum = tl.dot(
            grad.to(keys.dtype), keys, grad_query_sum, input_precision=PRECISION
        )
    store_rows(grad_query, first, grad_query_s, s, grad_query_sum * scale, SIZE, BLOCK_M, BLOCK_D)
    if HAS_DECAY:
        rows = first + tl.arange(0, BLOCK_M)
        tl.store(
            row_sums + (sample * heads + head) * row_length + origin + rows, row_sum, mask=rows < s
        )

    # One sum per tile, head and direction.
    tiles = tl.num_programs(0).to(tl.int64)
    direction_sums += tl.program_id(1).to(tl.int64) * tiles + tl.program_id(0)
    stride = tl.num_programs(1) * tiles
    if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 0:
        tl.store(direction_sums, tl.sum(sum_0, 0))
    if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 1:
        tl.store(direction_sums + stride, tl.sum(sum_1, 0))
    if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 2:
        tl.store(direction_sums + 2 * stride, tl.sum(sum_2, 0))
    if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 3:
        tl.store(direction_sums + 3 * stride, tl.sum(sum_3, 0))
