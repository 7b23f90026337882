"""What the kernels share: tiles of states, and the scores of a tile.

Positions: query i of the s stands at `offset + i` of the t positions, `offset` being t - s. Pointers to a tile are
int64 from its first row on, so that no product of a row and a stride overflows; within a tile int32 is enough.

Tables are `[h, MARGIN + max_kv_len + MARGIN]` float32. A tile reaches at most two tiles' sides beyond the distances that are
seen, and so looks up every pair without a mask: the bias, in units of log2, is -inf in the margins, and that is all
that hides the future, what lies beyond a window, and keys after the last.

What a row of queries brings from the forward pass is `[b, h, rows, 2]` float32: log2 of the softmax's denominator, and
the products' sum (`rows.py`). There are enough rows for whole tiles; those of no query have a denominator of inf.

Legend: m rows of queries, n rows of keys, d head size (SIZE; BLOCK_D is the power of two that holds it).
"""

import triton
import triton.language as tl

MARGIN = 256


@triton.jit
def load_rows(base, first, stride, rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[ROWS, BLOCK_D]` from row `first` on, zero outside of 0 ... rows-1 and beyond the head's size."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row >= 0) & (first + row < rows)
    if SIZE == BLOCK_D:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside[:, None] & (column[None, :] < SIZE), other=0.0)
    return tile


@triton.jit
def store_rows(base, first, stride, rows, tile, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The opposite of `load_rows`: what lies inside is written."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row < rows)[:, None] & (column[None, :] < SIZE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


# Whether kernels are compiled here, or run by Triton's interpreter, which knows no assembly.
COMPILED = tl.constexpr(isinstance(store_rows, triton.JITFunction))


@triton.jit
def look_up(table, nearest, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr):
    """The table's entries `[ROWS, COLUMNS]` for a tile of pairs; `nearest` is the distance of its first pair.

    The distance grows by 1 from row to row and falls by 1 from column to column; ACROSS, it is the other way around.

    Written as `tl.load`, the loads would be taken for operands of the matrix products and staged through shared memory
    one word at a time, a stage or two ahead. With 64-bit offsets, a pointer to which rows are added before columns, and
    numbers that no other part of the kernel uses (they do not begin at 0), a thread's addresses fold into one and
    constants, and pairs at the same distance into one load: 18 for the 32 pairs of a 128 x 64 tile and 8 warps.
    """
    row = tl.arange(ROWS, 2 * ROWS).to(tl.int64)
    column = tl.arange(COLUMNS, 2 * COLUMNS).to(tl.int64)
    if ACROSS:
        pointers = (table + (nearest + ROWS - COLUMNS) + column)[None, :] - row[:, None]
    else:
        pointers = (table + (nearest + COLUMNS - ROWS) + row)[:, None] - column[None, :]
    if COMPILED:
        entries = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        entries = tl.load(pointers)
    return entries


@triton.jit
def load_pairs(pairs, first, ROWS: tl.constexpr):
    """Both columns of the rows first ... first+ROWS-1, each `[ROWS]`; see above."""
    # As in `look_up`, for the sake of folded addresses.
    pointers = (pairs + 2 * (first - ROWS)) + 2 * tl.arange(ROWS, 2 * ROWS).to(tl.int64)
    if COMPILED:
        left, right = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [pointers.to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        left = tl.load(pointers)
        right = tl.load(pointers + 1)
    return left, right


@triton.jit
def tile_scores(
    products, nearest, at_edge, bias, weight, scale_log2,
    HAS_TABLE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 from q.k, -inf for pairs out of sight; and the weights, or 1.

    `bias` and `weight` point to their head's entry for distance 0; `nearest` and ACROSS are as in `look_up`. Where the
    bias says nothing but what is in sight (not HAS_TABLE), it is looked up only where something is not: `at_edge`.
    """
    factors = 1.0
    if HAS_TABLE:
        scores = products * scale_log2
        if HAS_WEIGHT:
            factors = look_up(weight, nearest, ROWS, COLUMNS, ACROSS)
            scores = scores * factors
        scores = scores + look_up(bias, nearest, ROWS, COLUMNS, ACROSS)
    else:
        # Before the scale, a positive one: what follows it then takes the product and a subtraction in one.
        if at_edge:
            products = products + look_up(bias, nearest, ROWS, COLUMNS, ACROSS)
        scores = products * scale_log2
    return scores, factors


@triton.jit
def round_up(number, multiple: tl.constexpr):
    """The next multiple of a number >= 0."""
    return (number + multiple - 1) // multiple * multiple


@triton.jit
def key_ranges(first, offset, t, window, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, full, part, end) of the keys of a tile of queries: in [full, part) every query sees every key."""
    nearest = offset + first
    farthest = nearest + BLOCK_M - 1
    end = tl.minimum(t, farthest + 1)
    begin = 0
    full = 0
    if HAS_WINDOW:
        begin = tl.maximum(nearest - window + 1, 0) // BLOCK_N * BLOCK_N
        full = round_up(tl.maximum(farthest - window + 1, 0), BLOCK_N)
    part = tl.maximum((nearest + 1) // BLOCK_N * BLOCK_N, begin)
    full = tl.minimum(full, part)
    return begin, full, part, end
