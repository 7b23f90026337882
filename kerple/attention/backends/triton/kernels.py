"""The Triton kernels of the forward pass, and the conventions of all kernels. Those of the backward
pass are in `gradient_kernels.py` and `table_kernels.py`. `launch.py` describes the algorithm and is
the only module that calls them.

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
    load_rows,
    look_up,
    store_rows,
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
