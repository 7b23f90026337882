"""The backward pass for the states: a program per tile of keys for key and value, one per tile of queries for query.

Each adds up what it owns in registers, in an order that is always the same: nothing is shared, nothing is atomic. The
query's programs also add up the gradients of numbers on which a table depends, where its derivatives by them, tables
themselves, are given (`directions`).

Legend: b batch, h heads, s query length, t key length, d head size, q tiles of queries.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.tiles import (
    key_ranges,
    load_pairs,
    load_rows,
    look_up,
    round_up,
    store_rows,
    tile_scores,
)


@triton.jit
def key_value_kernel(
    query, key, value, bias, weight, upstream, pairs, key_gradient, value_gradient,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    upstream_b, upstream_h, upstream_s, key_gradient_b, key_gradient_h, key_gradient_t,
    value_gradient_b, value_gradient_h, value_gradient_t,
    table_h, pairs_h, heads, s, t, scale, scale_log2, window,
    SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of key and value, `[b, h, t, d]`; `upstream` is the context's, `[b, h, s, d]`."""
    first = tl.program_id(0) * BLOCK_N
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query += sample * query_b + head * query_h
    key += sample * key_b + head * key_h
    value += sample * value_b + head * value_h
    upstream += sample * upstream_b + head * upstream_h
    key_gradient += sample * key_gradient_b + head * key_gradient_h
    value_gradient += sample * value_gradient_b + head * value_gradient_h
    pairs += (sample * heads + head) * pairs_h
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    offset = t - s

    keys = load_rows(key, first, key_t, t, SIZE, BLOCK_N, BLOCK_D)
    values = load_rows(value, first, value_t, t, SIZE, BLOCK_N, BLOCK_D)
    keys_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    values_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    # Queries from `begin` on see some key; in [full, part) all of them see all keys.
    last = first + BLOCK_N - 1
    begin = tl.maximum(first - offset, 0) // BLOCK_M * BLOCK_M
    full = round_up(tl.maximum(last - offset, 0), BLOCK_M)
    part = s // BLOCK_M * BLOCK_M
    end = s
    if HAS_WINDOW:
        part = tl.minimum(part, tl.maximum(first + window - offset, 0) // BLOCK_M * BLOCK_M)
        end = tl.minimum(end, tl.maximum(last + window - offset, 0))
    # Once at least, even for keys that no query sees: a loop that may not run at all makes ptxas wait for every single
    # matrix product in it.
    end = tl.maximum(end, begin + 1)
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_M):
        rows = load_rows(query, start, query_s, s, SIZE, BLOCK_M, BLOCK_D)
        denominator, expected = load_pairs(pairs, start, BLOCK_M)
        products = tl.dot(keys, tl.trans(rows), input_precision=PRECISION)
        nearest = offset + start - first
        if HAS_WINDOW:
            # Where no query sees any of the keys, still within the margin.
            nearest = tl.minimum(nearest, window + BLOCK_N)
        scores, factors = tile_scores(
            products, nearest, (start < full) | (start >= part), bias, weight, scale_log2,
            HAS_TABLE, HAS_WEIGHT, BLOCK_N, BLOCK_M, True,
        )  # fmt: skip
        probabilities = tl.exp2(scores - denominator[None, :])
        upstreams = load_rows(upstream, start, upstream_s, s, SIZE, BLOCK_M, BLOCK_D)
        values_sum = tl.dot(probabilities.to(upstreams.dtype), upstreams, values_sum, input_precision=PRECISION)
        gradient = tl.dot(values, tl.trans(upstreams), input_precision=PRECISION)
        gradient = probabilities * (gradient - expected[None, :])
        if HAS_WEIGHT:
            gradient = gradient * factors
        keys_sum = tl.dot(gradient.to(rows.dtype), rows, keys_sum, input_precision=PRECISION)
    store_rows(key_gradient, first, key_gradient_t, t, keys_sum * scale, SIZE, BLOCK_N, BLOCK_D)
    store_rows(value_gradient, first, value_gradient_t, t, values_sum, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def _along(
    gradient, products, directions, INDEX: tl.constexpr, direction_p, nearest, OF_BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Per row the sum of the scores' gradient times one of the directions: those of the bias come before those of the
    weight, by which q.k is multiplied.
    """
    if INDEX >= OF_BIAS:
        gradient = gradient * products
    return tl.sum(gradient * look_up(directions + INDEX * direction_p, nearest, ROWS, COLUMNS, False), 1)


@triton.jit
def query_kernel(
    query, key, value, bias, weight, upstream, pairs, directions, query_gradient, sums,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    upstream_b, upstream_h, upstream_s, query_gradient_b, query_gradient_h, query_gradient_s,
    table_h, pairs_h, direction_p, heads, s, t, scale, scale_log2, window,
    SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    OF_BIAS: tl.constexpr, OF_WEIGHT: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of query, `[b, h, s, d]`; and sums `[p, b, h, q]` over a tile's pairs of the score's gradient times the
    table directions[p] `[h, ...]`, and times q.k where it is one of the last OF_WEIGHT: at most 4 directions in all.
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query += sample * query_b + head * query_h
    key += sample * key_b + head * key_h
    value += sample * value_b + head * value_h
    upstream += sample * upstream_b + head * upstream_h
    query_gradient += sample * query_gradient_b + head * query_gradient_h
    pairs += (sample * heads + head) * pairs_h
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    directions += head * table_h + MARGIN
    offset = t - s

    denominator, expected = load_pairs(pairs, first, BLOCK_M)
    queries = load_rows(query, first, query_s, s, SIZE, BLOCK_M, BLOCK_D)
    upstreams = load_rows(upstream, first, upstream_s, s, SIZE, BLOCK_M, BLOCK_D)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sum_0 = tl.zeros([BLOCK_M], tl.float32)
    sum_1 = tl.zeros([BLOCK_M], tl.float32)
    sum_2 = tl.zeros([BLOCK_M], tl.float32)
    sum_3 = tl.zeros([BLOCK_M], tl.float32)
    begin, full, part, end = key_ranges(first, offset, t, window, HAS_WINDOW, BLOCK_M, BLOCK_N)
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_N):
        keys = load_rows(key, start, key_t, t, SIZE, BLOCK_N, BLOCK_D)
        values = load_rows(value, start, value_t, t, SIZE, BLOCK_N, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        nearest = offset + first - start
        scores, factors = tile_scores(
            products, nearest, (start < full) | (start >= part), bias, weight, scale_log2,
            HAS_TABLE, HAS_WEIGHT, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        probabilities = tl.exp2(scores - denominator[:, None])
        gradient = tl.dot(upstreams, tl.trans(values), input_precision=PRECISION)
        gradient = probabilities * (gradient - expected[:, None])
        if OF_BIAS + OF_WEIGHT > 0:
            sum_0 += _along(gradient, products, directions, 0, direction_p, nearest, OF_BIAS, BLOCK_M, BLOCK_N)
        if OF_BIAS + OF_WEIGHT > 1:
            sum_1 += _along(gradient, products, directions, 1, direction_p, nearest, OF_BIAS, BLOCK_M, BLOCK_N)
        if OF_BIAS + OF_WEIGHT > 2:
            sum_2 += _along(gradient, products, directions, 2, direction_p, nearest, OF_BIAS, BLOCK_M, BLOCK_N)
        if OF_BIAS + OF_WEIGHT > 3:
            sum_3 += _along(gradient, products, directions, 3, direction_p, nearest, OF_BIAS, BLOCK_M, BLOCK_N)
        if HAS_WEIGHT:
            gradient = gradient * factors
        total = tl.dot(gradient.to(keys.dtype), keys, total, input_precision=PRECISION)
    store_rows(query_gradient, first, query_gradient_s, s, total * scale, SIZE, BLOCK_M, BLOCK_D)
    tiles = tl.num_programs(0).to(tl.int64)
    sums += tl.program_id(1).to(tl.int64) * tiles + tl.program_id(0)
    each = tl.num_programs(1) * tiles
    if OF_BIAS + OF_WEIGHT > 0:
        tl.store(sums, tl.sum(sum_0, 0))
    if OF_BIAS + OF_WEIGHT > 1:
        tl.store(sums + each, tl.sum(sum_1, 0))
    if OF_BIAS + OF_WEIGHT > 2:
        tl.store(sums + 2 * each, tl.sum(sum_2, 0))
    if OF_BIAS + OF_WEIGHT > 3:
        tl.store(sums + 3 * each, tl.sum(sum_3, 0))
