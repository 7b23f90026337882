"""The backward pass for the states: a program per tile of keys for key and value, one per tile of queries for query.

Each adds up what it owns in registers, in an order that is always the same: nothing is shared, nothing is atomic.

Legend: b batch, h heads, s query length, t key length, d head size.
"""

import triton
import triton.language as tl

from megatron.model.attention.kernels.tiles import key_ranges, load_rows, round_up, store_rows, tile_scores


@triton.jit
def row_products_kernel(
    context, gradient, products,
    context_b, context_h, context_s, gradient_b, gradient_h, gradient_s,
    heads, s, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Per query, context . its gradient, float32 `[b, h, s]`: the sum over keys of probability times its gradient."""
    first = tl.program_id(0) * BLOCK_M
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    context += sample * context_b + head * context_h
    gradient += sample * gradient_b + head * gradient_h
    left = load_rows(context, first, context_s, s, SIZE, BLOCK_M, BLOCK_D, True).to(tl.float32)
    right = load_rows(gradient, first, gradient_s, s, SIZE, BLOCK_M, BLOCK_D, True).to(tl.float32)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(products + (sample * heads + head) * s + rows, tl.sum(left * right, 1), mask=rows < s)


@triton.jit
def _take_queries(
    key_gradient, value_gradient, keys, values, query, upstream, log_sum, row_products, bias, weight,
    query_stride, upstream_stride, begin, end, first, offset, s, scale_log2, window,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Queries begin ... end-1 into the gradients of a tile of keys; tiles of scores are `[n, m]`."""
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        queries = load_rows(query, start, query_stride, s, SIZE, BLOCK_M, BLOCK_D, MASKED)
        if MASKED:
            # Queries that are not there get probabilities of exp2(-inf).
            denominator = tl.load(log_sum + rows, mask=rows < s, other=float("inf"))
            expected = tl.load(row_products + rows, mask=rows < s, other=0.0)
        else:
            denominator = tl.load(log_sum + rows)
            expected = tl.load(row_products + rows)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        scores, factors = tile_scores(
            products, offset + start - first, bias, weight, scale_log2, window,
            HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, MASKED, BLOCK_N, BLOCK_M, True,
        )  # fmt: skip
        probabilities = tl.exp2(scores - denominator[None, :])
        upstreams = load_rows(upstream, start, upstream_stride, s, SIZE, BLOCK_M, BLOCK_D, MASKED)
        value_gradient = tl.dot(probabilities.to(upstreams.dtype), upstreams, value_gradient, input_precision=PRECISION)
        gradient = tl.dot(values, tl.trans(upstreams), input_precision=PRECISION)
        gradient = probabilities * (gradient - expected[None, :])
        if HAS_WEIGHT:
            gradient = gradient * factors
        key_gradient = tl.dot(gradient.to(queries.dtype), queries, key_gradient, input_precision=PRECISION)
    return key_gradient, value_gradient


@triton.jit
def key_value_kernel(
    query, key, value, bias, weight, upstream, log_sum, row_products, key_gradient, value_gradient,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    upstream_b, upstream_h, upstream_s, key_gradient_b, key_gradient_h, key_gradient_t,
    value_gradient_b, value_gradient_h, value_gradient_t,
    table_h, heads, s, t, scale, scale_log2, window,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
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
    log_sum += (sample * heads + head) * s
    row_products += (sample * heads + head) * s
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    offset = t - s

    keys = load_rows(key, first, key_t, t, SIZE, BLOCK_N, BLOCK_D, True)
    values = load_rows(value, first, value_t, t, SIZE, BLOCK_N, BLOCK_D, True)
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
    part = tl.maximum(part, begin)
    full = tl.minimum(full, part)
    keys_sum, values_sum = _take_queries(
        keys_sum, values_sum, keys, values, query, upstream, log_sum, row_products, bias, weight,
        query_s, upstream_s, begin, full, first, offset, s, scale_log2, window,
        SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, True,
    )  # fmt: skip
    keys_sum, values_sum = _take_queries(
        keys_sum, values_sum, keys, values, query, upstream, log_sum, row_products, bias, weight,
        query_s, upstream_s, full, part, first, offset, s, scale_log2, window,
        SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, False,
    )  # fmt: skip
    keys_sum, values_sum = _take_queries(
        keys_sum, values_sum, keys, values, query, upstream, log_sum, row_products, bias, weight,
        query_s, upstream_s, part, end, first, offset, s, scale_log2, window,
        SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, True,
    )  # fmt: skip
    store_rows(key_gradient, first, key_gradient_t, t, keys_sum * scale, SIZE, BLOCK_N, BLOCK_D)
    store_rows(value_gradient, first, value_gradient_t, t, values_sum, SIZE, BLOCK_N, BLOCK_D)


@triton.jit
def _take_keys(
    query_gradient, queries, upstreams, denominator, expected, key, value, bias, weight,
    key_stride, value_stride, begin, end, first, offset, t, scale_log2, window,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys begin ... end-1 into the gradient of a tile of queries."""
    for start in range(begin, end, BLOCK_N):
        keys = load_rows(key, start, key_stride, t, SIZE, BLOCK_N, BLOCK_D, MASKED)
        values = load_rows(value, start, value_stride, t, SIZE, BLOCK_N, BLOCK_D, MASKED)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, factors = tile_scores(
            products, offset + first - start, bias, weight, scale_log2, window,
            HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, MASKED, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        probabilities = tl.exp2(scores - denominator[:, None])
        gradient = tl.dot(upstreams, tl.trans(values), input_precision=PRECISION)
        gradient = probabilities * (gradient - expected[:, None])
        if HAS_WEIGHT:
            gradient = gradient * factors
        query_gradient = tl.dot(gradient.to(keys.dtype), keys, query_gradient, input_precision=PRECISION)
    return query_gradient


@triton.jit
def query_kernel(
    query, key, value, bias, weight, upstream, log_sum, row_products, query_gradient,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    upstream_b, upstream_h, upstream_s, query_gradient_b, query_gradient_h, query_gradient_s,
    table_h, heads, s, t, scale, scale_log2, window,
    SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of query, `[b, h, s, d]`."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query += sample * query_b + head * query_h
    key += sample * key_b + head * key_h
    value += sample * value_b + head * value_h
    upstream += sample * upstream_b + head * upstream_h
    query_gradient += sample * query_gradient_b + head * query_gradient_h
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    offset = t - s

    rows = first + tl.arange(0, BLOCK_M)
    lines = (sample * heads + head) * s + rows
    denominator = tl.load(log_sum + lines, mask=rows < s, other=float("inf"))
    expected = tl.load(row_products + lines, mask=rows < s, other=0.0)
    queries = load_rows(query, first, query_s, s, SIZE, BLOCK_M, BLOCK_D, True)
    upstreams = load_rows(upstream, first, upstream_s, s, SIZE, BLOCK_M, BLOCK_D, True)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, full, part, end = key_ranges(first, offset, t, window, HAS_WINDOW, BLOCK_M, BLOCK_N)
    if HAS_WINDOW:
        total = _take_keys(
            total, queries, upstreams, denominator, expected, key, value, bias, weight,
            key_t, value_t, begin, full, first, offset, t, scale_log2, window,
            SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, True,
        )  # fmt: skip
    total = _take_keys(
        total, queries, upstreams, denominator, expected, key, value, bias, weight,
        key_t, value_t, full, part, first, offset, t, scale_log2, window,
        SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, False,
    )  # fmt: skip
    total = _take_keys(
        total, queries, upstreams, denominator, expected, key, value, bias, weight,
        key_t, value_t, part, end, first, offset, t, scale_log2, window,
        SIZE, HAS_BIAS, HAS_WEIGHT, HAS_WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION, True,
    )  # fmt: skip
    store_rows(query_gradient, first, query_gradient_s, s, total * scale, SIZE, BLOCK_M, BLOCK_D)
