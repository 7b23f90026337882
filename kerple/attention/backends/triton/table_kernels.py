"""The Triton kernels for the gradients of any table over distance; see `kernels.py` for the
conventions.

These gradients are sums of the scores' gradient along diagonals, without atomics. Square tiles at
the same block distance k (query tile m and the key tile k tiles before it) have the same distances
in the same places. So a program handles one block distance, adds complete tiles in registers, and
writes one tile. A second kernel sums these tiles along their diagonals. Both orders are fixed.

Legend: h heads, d head size, k block distances, p parts of the tiles at a block distance.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.kernels import input_pointers, query_base, tile_scores
from kerple.attention.backends.triton.memory import (
    DECAY_BLOCK,
    DOCUMENT_TILE,
    load_decay,
    load_document_tile,
    load_row_stats,
    load_rows,
)


@triton.jit
def sum_tiles_kernel(
    query, key, value, bias, weight, decay, bases, documents, tile_counts, grad_context, row_stats,
    bias_tiles, weight_tiles,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t,
    grad_context_b, grad_context_h, grad_context_s,
    table_h, decay_h, bases_h, row_stats_h, first_head, batch, heads, group, s, t, scale,
    scale_log2, SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DECAY: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, GRAD_BIAS: tl.constexpr, GRAD_WEIGHT: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """bias_tiles and weight_tiles `[h, p, k, BLOCK, BLOCK]`: the scores' gradient, and this times
    q.k, summed over the tiles at block distance k of one of p parts of all samples and queries.
    """
    # Pointers to this head, at the first sample.
    block_distance = tl.program_id(0)
    part = tl.program_id(1)
    head = (first_head + tl.program_id(2)).to(tl.int64)
    kv_head = ((first_head + tl.program_id(2)) // group).to(tl.int64)
    query, key, value, bias, weight = input_pointers(
        query, key, value, bias, weight,
        query_b, query_h, key_b, key_h, value_b, value_h, table_h, 0, head, kv_head, MARGIN,
    )  # fmt: skip
    grad_context += head * grad_context_h
    offset = t - s

    # The first tile of queries for which keys at this block distance exist.
    first_tile = tl.maximum(block_distance * BLOCK - offset, 0) // BLOCK
    sample_tiles = (s + BLOCK - 1) // BLOCK - first_tile
    tiles = tl.maximum(sample_tiles, 0) * batch
    if HAS_DOCUMENTS:
        # The tiles of `documents` are in descending order of position: those with keys at this
        # distance come first.
        tiles = tl.load(tile_counts + block_distance * BLOCK // DOCUMENT_TILE) * (
            DOCUMENT_TILE // BLOCK
        )
    part_tiles = (tiles + tl.num_programs(1) - 1) // tl.num_programs(1)
    row = tl.arange(0, BLOCK)
    bias_sum = tl.zeros([BLOCK, BLOCK], tl.float32)
    weight_sum = tl.zeros([BLOCK, BLOCK], tl.float32)
    for index in range(part * part_tiles, tl.minimum((part + 1) * part_tiles, tiles)):
        if HAS_DOCUMENTS:
            sample, origin, queries_end, place, first = load_document_tile(documents, index, BLOCK)
            keys_end, padded_row = queries_end, head
        else:
            sample = (index // sample_tiles).to(tl.int64)
            first = (first_tile + index % sample_tiles) * BLOCK
            origin, place, padded_row = 0, 0, sample * heads + head
            queries_end, keys_end = s, t
        first_key = offset + first - block_distance * BLOCK

        # Recompute the probabilities.
        lse, delta = load_row_stats(row_stats + padded_row * row_stats_h + 2 * place, first, BLOCK)
        queries = load_rows(
            query + sample * query_b + origin * query_s,
            first,
            query_s,
            queries_end,
            SIZE,
            BLOCK,
            BLOCK_D,
        )
        keys = load_rows(
            key + sample * key_b + origin * key_t, first_key, key_t, keys_end, SIZE, BLOCK, BLOCK_D
        )
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, _ = tile_scores(
            products,
            block_distance * BLOCK,
            True,
            bias,
            weight,
            scale_log2,
            True,
            HAS_WEIGHT,
            BLOCK,
            BLOCK,
            False,
        )
        if HAS_DECAY:
            head_bases = bases + padded_row * bases_h + place // DECAY_BLOCK
            # The keys of this tile may be in two blocks.
            key_bases = tl.load(
                head_bases + tl.maximum(first_key + row, 0) // DECAY_BLOCK,
                mask=first_key + row < keys_end,
                other=0.0,
            )
            shift = key_bases - query_base(head_bases, offset, first)
            key_decay = load_decay(decay + padded_row * decay_h + MARGIN + place, first_key, BLOCK)
            scores = scores - (key_decay + shift)[None, :]
        # The table does not mask keys before the first one.
        scores = tl.where((first_key + row >= 0)[None, :], scores, float("-inf"))
        probabilities = tl.exp2(scores - lse[:, None])

        # The scores' gradient.
        grad_contexts = load_rows(
            grad_context + sample * grad_context_b + origin * grad_context_s, first,
            grad_context_s, queries_end, SIZE, BLOCK, BLOCK_D,
        )  # fmt: skip
        values = load_rows(
            value + sample * value_b + origin * value_t,
            first_key,
            value_t,
            keys_end,
            SIZE,
            BLOCK,
            BLOCK_D,
        )
        grad_scores = tl.dot(grad_contexts, tl.trans(values), input_precision=PRECISION)
        grad_scores = probabilities * (grad_scores - delta[:, None])
        if GRAD_BIAS:
            bias_sum += grad_scores
        if GRAD_WEIGHT:
            weight_sum += grad_scores * products
    tile_index = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + part) * tl.num_programs(
        0
    ) + block_distance
    entries = tile_index * BLOCK * BLOCK + row[:, None] * BLOCK + row[None, :]
    if GRAD_BIAS:
        tl.store(bias_tiles + entries, bias_sum)
    if GRAD_WEIGHT:
        tl.store(weight_tiles + entries, weight_sum * scale)


@triton.jit
def sum_diagonals_kernel(
    tiles, grad_table, grad_table_h, parts, length, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Tiles `[h, p, k, BLOCK, BLOCK]` -> their sums over p and along diagonals, `[h, length]`
    float32.

    Row i of a tile at block distance k has the distance k * BLOCK + r in column i - r if i >= r. If
    i < r, that distance is in column i - r + BLOCK of the tile at block distance k + 1. So there is
    one entry per row and part.
    """
    block_distance = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK)
    # The entry of each row and column, in the tile at this block distance or the next one.
    in_next = row[:, None] < column[None, :]
    tile_index = block_distance + in_next.to(tl.int32)
    entries = tile_index.to(tl.int64) * (BLOCK * BLOCK) + row[:, None] * BLOCK
    entries += row[:, None] - column[None, :] + tl.where(in_next, BLOCK, 0)
    # The parts in their order; the last block distance has no next one.
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for part in range(parts):
        base = tiles + (head * parts + part) * tl.num_programs(0) * BLOCK * BLOCK
        total += tl.load(base + entries, mask=tile_index < tl.num_programs(0), other=0.0)
    distance = block_distance * BLOCK + column
    tl.store(grad_table + head * grad_table_h + distance, tl.sum(total, 0), mask=distance < length)
