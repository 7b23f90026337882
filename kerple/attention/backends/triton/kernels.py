"""The Triton kernels of the fused backend, except those for the gradients of tables
(`table_kernels.py`). `launch.py` describes the algorithm and is the only module that calls them.

Positions: query i is at position `offset` + i of the t key positions; `offset` is t - s. Pointers
to a tile are int64, so that the product of a row and a stride cannot overflow; int32 is enough
within a tile.

Tables over distance are `[h, MARGIN + max_kv_len + MARGIN]` float32. A tile extends at most two
tile sides beyond the visible distances, so every pair is looked up without a bounds check. The
bias, in units of log2, is -inf in the margins. This masks future keys, keys outside the window, and
keys after the last one.

The backward pass reads two float32 numbers per query, `row_stats` `[b, h, rows, 2]` (see
`row_stats_kernel`): `lse`, the log2 of the softmax's denominator, and `delta`, the sum over keys of
probability times its gradient. Rows are padded to complete tiles; lse is inf in the padding, so
that its probabilities are 0.

The bias of a decay is a difference c_i - c_j of prefix sums, one of the query and one of the key.
Sums of long texts are large, but their differences are small where they matter. So each sum, in
units of log2, is the sum of two float32 numbers: `bases` `[b, h, n]`, one for DECAY_BLOCK tokens,
and `decay` `[b, h, MARGIN + t + MARGIN]`, the rest. The softmax cancels the query's sum: all
kernels replace c_i by the same base for DECAY_BLOCK queries (`query_base`), also in lse. So a tile
loads one vector, that of its keys, and adds the difference of two bases to one number per row.

With HAS_DOCUMENTS, a program computes a tile of one document (see `launch.document_tiles`): s and t
are the document's length, and pointers begin at its first token, so no key of another document is
read. `row_stats`, `decay` and `bases` then have the documents one after another, each padded to
complete tiles, in the place of the rows.

Legend: b batch, h heads, g key/value heads (`group` = h/g query heads share one; Triton compiles a
kernel of its own for group 1), s query length, t key length, d head size (SIZE; BLOCK_D is the next
power of two), q tiles of queries, p jacobian directions, n blocks of tokens.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.memory import (
    COMPILED,
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

INTERPRETED = not COMPILED.value
MARGIN = 256


@triton.jit
def sample_and_heads(heads, group):
    """The sample, query head and key/value head of a program, int64, for a grid whose second
    dimension is b * h.
    """
    sample = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    return sample, head.to(tl.int64), (head // group).to(tl.int64)


@triton.jit
def input_pointers(
    query, key, value, bias, weight, query_b, query_h, key_b, key_h, value_b, value_h, table_h,
    sample, head, kv_head, MARGIN: tl.constexpr,
):  # fmt: skip
    """The inputs of a sample and head; bias and weight from distance 0 on."""
    query += sample * query_b + head * query_h
    key += sample * key_b + kv_head * key_h
    value += sample * value_b + kv_head * value_h
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    return query, key, value, bias, weight


@triton.jit
def query_base(bases, offset, first):
    """The base to which the scores and lse of a tile of queries refer."""
    return load_base(bases, offset + first // DECAY_BLOCK * DECAY_BLOCK)


@triton.jit
def tile_scores(
    products, first_distance, needs_mask, bias, weight, scale_log2,
    HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 from q.k, -inf for masked pairs; and the weights, or 1.

    `bias` and `weight` point to the head's entry for distance 0; `first_distance` and TRANSPOSED
    are as in `look_up`. Without tables (not HAS_TABLE) the bias is only a mask, and is looked up
    only if the tile `needs_mask`.
    """
    weights = 1.0
    if HAS_TABLE:
        scores = products * scale_log2
        if HAS_WEIGHT:
            weights = look_up(weight, first_distance, ROWS, COLUMNS, TRANSPOSED)
            scores = scores * weights
        scores = scores + look_up(bias, first_distance, ROWS, COLUMNS, TRANSPOSED)
    else:
        # Masked before the scale, which is positive, so that scaling and the next subtraction
        # become one instruction.
        if needs_mask:
            products = products + look_up(bias, first_distance, ROWS, COLUMNS, TRANSPOSED)
        scores = products * scale_log2
    return scores, weights


@triton.jit
def round_up(number, multiple: tl.constexpr):
    """The next multiple of a number >= 0."""
    return (number + multiple - 1) // multiple * multiple


@triton.jit
def key_ranges(
    first, offset, t, window, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """(begin, full, part, end): a tile of queries attends to keys in [begin, end), unmasked in
    [full, part).
    """
    first_position = offset + first
    last_position = first_position + BLOCK_M - 1
    end = tl.minimum(t, last_position + 1)
    begin = 0
    full = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full = round_up(tl.maximum(last_position - window + 1, 0), BLOCK_N)
    part = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin)
    full = tl.minimum(full, part)
    return begin, full, part, end


@triton.jit
def forward_kernel(
    query, key, value, bias, weight, decay, bases, documents, context, lse,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, context_b,
    context_h, context_s, table_h, decay_h, bases_h, heads, group, s, t, scale_log2, window,
    SIZE: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_DECAY: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """context `[b, h, s, d]` and lse `[b, h, s]`, with an online softmax. A program computes a tile
    of queries.
    """
    # The longest rows start first; the short ones fill the gaps at the end.
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
        context += origin * context_s

    # Pointers to this head.
    query, key, value, bias, weight = input_pointers(
        query, key, value, bias, weight,
        query_b, query_h, key_b, key_h, value_b, value_h, table_h, sample, head, kv_head, MARGIN,
    )  # fmt: skip
    context += sample * context_b + head * context_h
    lse += (sample * heads + head) * row_length + origin
    offset = t - s
    decay += padded_row * decay_h + MARGIN + place
    bases += padded_row * bases_h + place // DECAY_BLOCK
    base = 0.0
    if HAS_DECAY:
        base = query_base(bases, offset, first)

    # A tile of keys at a time, with the softmax over those so far.
    queries = load_rows(query, first, query_s, s, SIZE, BLOCK_M, BLOCK_D)
    context_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, full, part, end = key_ranges(first, offset, t, window, HAS_WINDOW, BLOCK_M, BLOCK_N)
    tl.assume(begin < end)
    for start in range(begin, end, BLOCK_N):
        keys = load_rows(key, start, key_t, t, SIZE, BLOCK_N, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, _ = tile_scores(
            products, offset + first - start, (start < full) | (start >= part), bias, weight,
            scale_log2, HAS_TABLE, HAS_WEIGHT, BLOCK_M, BLOCK_N, False,
        )  # fmt: skip
        if HAS_DECAY:
            scores = scores - load_decay(decay, start, BLOCK_N)[None, :]
        tile_max = tl.max(scores, 1)
        if HAS_DECAY:
            shift = load_base(bases, start) - base
            tile_max = tile_max - shift
        new_max = tl.maximum(row_max, tile_max)
        # A row at the start of its window may have only masked keys so far, and no maximum to
        # subtract.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - safe_max)
        subtracted = safe_max
        if HAS_DECAY:
            subtracted = safe_max + shift
        probabilities = tl.exp2(scores - subtracted[:, None])
        row_sum = row_sum * correction + tl.sum(probabilities, 1)
        context_sum = context_sum * correction[:, None]

        # The context so far, relative to the new maximum.
        values = load_rows(value, start, value_t, t, SIZE, BLOCK_N, BLOCK_D)
        context_sum = tl.dot(
            probabilities.to(values.dtype), values, context_sum, input_precision=PRECISION
        )
        row_max = new_max

    # Padding rows may have only masked keys, and others only biases of -inf: their context is 0,
    # and with an infinite lse, so are their probabilities in the backward pass.
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    row_max = tl.where(row_max == float("-inf"), float("inf"), row_max)
    store_rows(context, first, context_s, s, context_sum / row_sum[:, None], SIZE, BLOCK_M, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(lse + rows, row_max + tl.log2(row_sum), mask=rows < s)


@triton.jit
def row_stats_kernel(
    context, grad_context, lse, documents, row_stats,
    context_b, context_h, context_s, grad_context_b, grad_context_h, grad_context_s,
    heads, s, SIZE: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """row_stats `[b, h, rows, 2]`: lse `[b, h, s]`, and delta = context . grad_context. Padding
    rows get inf and 0.
    """
    first = tl.program_id(0) * BLOCK_M
    sample, head, _ = sample_and_heads(heads, 1)
    row_stats += 2 * (sample * heads + head) * tl.num_programs(0) * BLOCK_M
    row_length, origin = s, 0
    if HAS_DOCUMENTS:
        sample, origin, s, place, first = load_document_tile(documents, tl.program_id(0), BLOCK_M)
        context += origin * context_s
        grad_context += origin * grad_context_s
        row_stats += 2 * place
    context += sample * context_b + head * context_h
    grad_context += sample * grad_context_b + head * grad_context_h
    contexts = load_rows(context, first, context_s, s, SIZE, BLOCK_M, BLOCK_D).to(tl.float32)
    grad_contexts = load_rows(grad_context, first, grad_context_s, s, SIZE, BLOCK_M, BLOCK_D).to(
        tl.float32
    )
    rows = first + tl.arange(0, BLOCK_M)
    lse += (sample * heads + head) * row_length + origin
    row_lse = tl.load(lse + rows, mask=rows < s, other=float("inf"))
    tl.store(row_stats + 2 * rows, row_lse)
    tl.store(row_stats + 2 * rows + 1, tl.sum(contexts * grad_contexts, 1))


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
                grad,
                products,
                directions,
                0,
                directions_p,
                distance,
                BIAS_DIRECTIONS,
                BLOCK_M,
                BLOCK_N,
            )
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 1:
            sum_1 += sum_along_direction(
                grad,
                products,
                directions,
                1,
                directions_p,
                distance,
                BIAS_DIRECTIONS,
                BLOCK_M,
                BLOCK_N,
            )
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 2:
            sum_2 += sum_along_direction(
                grad,
                products,
                directions,
                2,
                directions_p,
                distance,
                BIAS_DIRECTIONS,
                BLOCK_M,
                BLOCK_N,
            )
        if BIAS_DIRECTIONS + WEIGHT_DIRECTIONS > 3:
            sum_3 += sum_along_direction(
                grad,
                products,
                directions,
                3,
                directions_p,
                distance,
                BIAS_DIRECTIONS,
                BLOCK_M,
                BLOCK_N,
            )

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
