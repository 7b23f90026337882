"""The gradients of tables over distance: sums of the scores' gradient along diagonals, without atomics.

Square tiles at one block distance k (query tile m with the keys that end k tiles before it) hold the same distances at
the same places. So a program owns a block distance, adds whole tiles up in registers over samples and queries, and
writes one tile at its end; a second kernel sums those tiles along their diagonals. Both orders are fixed.

Legend: h heads, s query length, t key length, d head size; k block distances, p parts of a block distance's tiles.
"""

import triton
import triton.language as tl

from kerple.attention.backends.triton.tiles import load_pairs, load_rows, tile_scores


@triton.jit
def sum_tiles_kernel(
    query, key, value, bias, weight, upstream, pairs, bias_tiles, weight_tiles,
    query_b, query_h, query_s, key_b, key_h, key_t, value_b, value_h, value_t, upstream_b, upstream_h, upstream_s,
    table_h, pairs_h, first_head, batch, heads, s, t, scale, scale_log2,
    SIZE: tl.constexpr, HAS_WEIGHT: tl.constexpr, OF_BIAS: tl.constexpr, OF_WEIGHT: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles `[h, p, k, BLOCK, BLOCK]` of the gradients of scores (bias), and of these times q.k (weight), summed over
    samples and over a part of the pairs of tiles at block distance k."""
    apart = tl.program_id(0)
    part = tl.program_id(1)
    head = (first_head + tl.program_id(2)).to(tl.int64)
    query += head * query_h
    key += head * key_h
    value += head * value_h
    upstream += head * upstream_h
    bias += head * table_h + MARGIN
    weight += head * table_h + MARGIN
    offset = t - s

    # The first tile of queries that is so far from a key that exists.
    lowest = tl.maximum(apart * BLOCK - offset, 0) // BLOCK
    each = (s + BLOCK - 1) // BLOCK - lowest
    tiles = tl.maximum(each, 0) * batch
    share = (tiles + tl.num_programs(1) - 1) // tl.num_programs(1)
    row = tl.arange(0, BLOCK)
    scores_sum = tl.zeros([BLOCK, BLOCK], tl.float32)
    products_sum = tl.zeros([BLOCK, BLOCK], tl.float32)
    for index in range(part * share, tl.minimum((part + 1) * share, tiles)):
        sample = (index // each).to(tl.int64)
        first = (lowest + index % each) * BLOCK
        first_key = offset + first - apart * BLOCK
        denominator, expected = load_pairs(pairs + (sample * heads + head) * pairs_h, first, BLOCK)
        queries = load_rows(query + sample * query_b, first, query_s, s, SIZE, BLOCK, BLOCK_D)
        keys = load_rows(key + sample * key_b, first_key, key_t, t, SIZE, BLOCK, BLOCK_D)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, _ = tile_scores(
            products, apart * BLOCK, True, bias, weight, scale_log2, True, HAS_WEIGHT, BLOCK, BLOCK, False
        )
        # The table does not hide keys before the first one.
        scores = tl.where((first_key + row >= 0)[None, :], scores, float("-inf"))
        probabilities = tl.exp2(scores - denominator[:, None])
        upstreams = load_rows(upstream + sample * upstream_b, first, upstream_s, s, SIZE, BLOCK, BLOCK_D)
        values = load_rows(value + sample * value_b, first_key, value_t, t, SIZE, BLOCK, BLOCK_D)
        gradient = tl.dot(upstreams, tl.trans(values), input_precision=PRECISION)
        gradient = probabilities * (gradient - expected[:, None])
        if OF_BIAS:
            scores_sum += gradient
        if OF_WEIGHT:
            products_sum += gradient * products
    place = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + part) * tl.num_programs(0) + apart
    tile = place * BLOCK * BLOCK + row[:, None] * BLOCK + row[None, :]
    if OF_BIAS:
        tl.store(bias_tiles + tile, scores_sum)
    if OF_WEIGHT:
        tl.store(weight_tiles + tile, products_sum * scale)


@triton.jit
def sum_diagonals_kernel(tiles, gradient, gradient_h, parts, max_kv_len, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Tiles `[h, p, k, BLOCK, BLOCK]` -> their sums over p and along diagonals, `[h, max_kv_len]` float32.

    Of the distance k * BLOCK + r, row i of a tile holds the entry in column i - r of block distance k where i >= r, and
    in column i - r + BLOCK of block distance k + 1 where not: one of each row and part.
    """
    apart = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    row = tl.arange(0, BLOCK)
    beyond = row[:, None] < column[None, :]
    number = apart + beyond.to(tl.int32)
    place = number.to(tl.int64) * (BLOCK * BLOCK) + row[:, None] * BLOCK
    place += row[:, None] - column[None, :] + tl.where(beyond, BLOCK, 0)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for part in range(parts):
        base = tiles + (head * parts + part) * tl.num_programs(0) * BLOCK * BLOCK
        total += tl.load(base + place, mask=number < tl.num_programs(0), other=0.0)
    distance = apart * BLOCK + column
    tl.store(gradient + head * gradient_h + distance, tl.sum(total, 0), mask=distance < max_kv_len)
