"""Loads and stores of the Triton kernels; see `kernels.py` for the conventions."""

import triton
import triton.language as tl

from kerple.attention.backends.triton.tiles import ROWS

# A multiple of every tile.
DECAY_BLOCK = tl.constexpr(ROWS)
DOCUMENT_TILE = tl.constexpr(ROWS)


@triton.jit
def load_rows(
    base, first, stride, rows, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """`[ROWS, BLOCK_D]` from row `first`, zero outside rows 0 ... rows-1 and the head size."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row >= 0) & (first + row < rows)
    # Head sizes that are a power of two need no mask of columns.
    if SIZE == BLOCK_D:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside[:, None] & (column[None, :] < SIZE), other=0.0)
    return tile


@triton.jit
def store_rows(
    base, first, stride, rows, tile, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store `[ROWS, BLOCK_D]` from row `first`, except rows >= `rows` and columns >= SIZE."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row < rows)[:, None] & (column[None, :] < SIZE)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


# Triton decides at a kernel's definition whether to compile or interpret it. The interpreter has no
# inline assembly.
COMPILED = tl.constexpr(isinstance(store_rows, triton.JITFunction))


@triton.jit
def load_float32(pointers):
    """Numbers that a kernel only reads; `tl.load` would stage them through shared memory."""
    if COMPILED:
        numbers = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];",
            "=f,l",
            [pointers.to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        numbers = tl.load(pointers)
    return numbers


@triton.jit
def look_up(
    table, first_distance, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The table's entries `[ROWS, COLUMNS]` for the pairs of a tile; `first_distance` is that of
    its first pair.

    The distance grows by 1 per row and falls by 1 per column; if TRANSPOSED, the other way around.

    `tl.load` would treat these loads as operands of the matrix products and stage them through
    shared memory one word at a time. With 64-bit offsets, a pointer to which rows are added before
    columns, and index ranges that no other part of the kernel uses (they do not start at 0), the
    addresses of a thread become one base plus constants, and pairs at the same distance share a
    load: 18 loads for the 32 pairs of a thread in a 128 x 64 tile with 8 warps.
    """
    # The ranges begin at ROWS and COLUMNS, which the base subtracts.
    row = tl.arange(ROWS, 2 * ROWS).to(tl.int64)
    column = tl.arange(COLUMNS, 2 * COLUMNS).to(tl.int64)
    if TRANSPOSED:
        pointers = (table + (first_distance + ROWS - COLUMNS) + column)[None, :] - row[:, None]
    else:
        pointers = (table + (first_distance + COLUMNS - ROWS) + row)[:, None] - column[None, :]
    return load_float32(pointers)


@triton.jit
def load_row_stats(row_stats, first, ROWS: tl.constexpr):
    """lse and delta of the rows first ... first+ROWS-1, each `[ROWS]`."""
    # Written like `look_up`, so that addresses become constants.
    pointers = (row_stats + 2 * (first - ROWS)) + 2 * tl.arange(ROWS, 2 * ROWS).to(tl.int64)
    if COMPILED:
        lse, delta = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [pointers.to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        lse = tl.load(pointers)
        delta = tl.load(pointers + 1)
    return lse, delta


@triton.jit
def load_decay(decay, first, ROWS: tl.constexpr):
    """The prefix sums of the keys first ... first+ROWS-1 without their base, `[ROWS]`."""
    return load_float32((decay + (first - ROWS)) + tl.arange(ROWS, 2 * ROWS).to(tl.int64))


@triton.jit
def load_base(bases, position):
    """The base of the token at a position."""
    return load_float32(bases + position // DECAY_BLOCK)


@triton.jit
def store_sums(pointers, sums, mask):
    """`tl.store` would rearrange the sums in shared memory, and matrix products would wait."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.f32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,f,r",
            [pointers.to(tl.int64), sums, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointers, sums, mask=mask)


@triton.jit
def load_document_tile(documents, index, BLOCK: tl.constexpr):
    """Tile number `index` of BLOCK tokens: (its sample, the first token of its document in the row,
    the document's length, the place of its first token in padded documents, the position of the
    tile in the document).

    documents: see `launch.document_tiles`.
    """
    # A tile of the table has several tiles of a smaller kernel.
    parts = DOCUMENT_TILE // BLOCK
    row = documents + index // parts * 5
    first = tl.load(row + 4) + index % parts * BLOCK
    sample, origin, place = (
        tl.load(row).to(tl.int64),
        tl.load(row + 1).to(tl.int64),
        tl.load(row + 3).to(tl.int64),
    )
    return sample, origin, tl.load(row + 2), place, first
