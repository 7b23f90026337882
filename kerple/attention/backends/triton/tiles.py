"""Tile sizes of the fused kernels, by GPU.

They follow from counts in compiled machine code (`benchmarks/kernel_counts.py --arch`), not from
measurements. For each GPU, a tile fits into shared memory, spills few or no registers, and keeps
the busiest unit (instructions, tensor cores, exponentials or shared memory) busy for the fewest
cycles. Cycles below are for 8,192 pairs of query and key in bfloat16. The GPUs differ most in their
matrix instructions:

- **mma.sync** (sm_80 to sm_89, sm_12x): operands and sums are in registers. With four warps, most
  tiles spill, so all but the smallest have eight, and a multiprocessor runs one program. Three
  stages, where they fit, load the next tile during the current one. Tensor cores are the limit: at
  head size 64, the forward kernel takes 2,048 cycles for its products on sm_120, and 850 to issue
  its instructions. At head size 128, the kernel for keys and values takes 5,120 cycles to load its
  operands from shared memory with 128 queries (112 KiB, sm_80) and 7,168 with 64 (72 KiB). Of the
  other tiles that fit into 99 KiB, 32 x 128 spills up to 192 bytes per thread, and 32 x 64 leaves
  four warps on a multiprocessor. Without tables, a branch around the lookup of the mask would make
  Triton rearrange the scores in shared memory and spill up to 1,592 bytes per thread on sm_80 and
  656 on sm_120, so these GPUs look up a table of zeros. With grouped queries and documents, 64 x
  128 would spill up to 168 bytes.
- **wgmma** (sm_90): operands are in shared memory.
- **tcgen05** (sm_10x, sm_11x): operands are in shared memory and sums in tensor memory, which
  leaves registers for larger tiles. The products of the forward kernel take 256 cycles at head size
  64, so instructions are the limit. At head size 128, the kernel for keys and values issues 30 %
  fewer with 64 x 128 than with Hopper's 32 x 128.

float32 is computed without tensor cores and is the same everywhere. Three products in TF32
("tf32x3") are an alternative for `attention_gpu.py --tune`: Triton adds each tile's sum in float32,
so the error, emulated with tensor cores that truncate, is that of float32. On sm_90 their kernels
issue 42 to 57 % fewer instructions, on sm_80 the forward kernel issues 2 % more. With grouped
queries, the key and value kernel needs eight warps: four would spill 352 bytes per thread.
"""

from dataclasses import dataclass

import torch

# Rows of queries are padded to a multiple of this, which is a multiple of every tile.
ROWS = 128


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, and the warps and pipeline stages of a program."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel. `tables` must be square.

    Attributes:
        kib: the maximum shared memory of the kernels, in KiB.
        skip_mask: without tables, tiles without masked pairs skip the lookup of the mask; otherwise
            the kernels look up a table of zeros.
        precision: how float32 inputs are multiplied, an `input_precision` of `tl.dot`.
    """

    forward: Tile
    key_value: Tile
    query: Tile
    tables: Tile
    kib: int
    skip_mask: bool = True
    precision: str = "ieee"


@dataclass(frozen=True)
class Gpu:
    """What the choice of tiles depends on.

    Attributes:
        name: for messages.
        architecture: the compute capability, 10 * major + minor: 90 is sm_90.
        shared_memory: bytes that a program can use.
    """

    name: str
    architecture: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        """The GPU of a device; for a CPU, where kernels are interpreted, a Hopper GPU."""
        if device.type != "cuda":
            return cls("CPU", 90, 227 * 1024)
        properties = torch.cuda.get_device_properties(device)
        # PyTorch's type stubs lack the attribute shared_memory_per_block_optin.
        shared_memory: int = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
        return cls(properties.name, 10 * properties.major + properties.minor, shared_memory)


def no_tiles_reason(gpu: Gpu, dtype: torch.dtype | None, head_size: int | None) -> str | None:
    """Why the kernels cannot run on a GPU, as the rest of a sentence; None if they can."""
    if gpu.architecture < 80:
        capability = f"{gpu.architecture // 10}.{gpu.architecture % 10}"
        return f"needs compute capability 8.0 or higher (Ampere), but {gpu.name} has {capability}"
    if dtype is None or head_size is None:
        return None
    # The shared memory does not depend on the other arguments.
    kib = tiles_for(gpu, dtype, head_size, weight=True).kib
    if kib * 1024 > gpu.shared_memory:
        available = gpu.shared_memory // 1024
        return (
            f"needs {kib} KiB of shared memory for {dtype} and head size {head_size}; {gpu.name} "
            f"has {available}"
        )
    return None


def tiles_for(
    gpu: Gpu,
    dtype: torch.dtype,
    head_size: int,
    *,
    weight: bool,
    grouped: bool = False,
    documents: bool = False,
) -> Tiles:
    """The tiles for a GPU. An unknown architecture gets those of mma.sync, which need the least
    shared memory.

    Tiles depend only on the arguments, so that the order of sums is fixed. They may not fit: see
    `no_tiles_reason`.
    """
    small = head_size <= 64
    major = gpu.architecture // 10
    if dtype == torch.float32:
        return _float32_tiles(small, grouped)

    # wgmma and tcgen05.
    square = Tile(64, 64, 8, 2)
    query = Tile(128, 64, 8, 2)
    if major == 9 and small:
        forward = Tile(128, 64, 4, 3)
        square = Tile(64, 64, 4, 2)
        if weight:
            forward = Tile(128, 64, 8, 3)
        return Tiles(forward, Tile(64, 128, 8, 2), query, square, kib=64)
    if major == 9:
        return Tiles(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), query, square, kib=128)
    if major in (10, 11) and small:
        if not weight:
            square = Tile(64, 64, 4, 2)
        return Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 8, 2), query, square, kib=82)
    if major in (10, 11):
        return Tiles(Tile(128, 64, 8, 3), Tile(64, 128, 8, 2), query, square, kib=162)

    # mma.sync.
    forward = Tile(128, 64, 8, 3)
    if small:
        key_value = Tile(64, 128, 8, 3)
        square = Tile(64, 64, 4, 2)
        if grouped and documents:
            key_value = Tile(32, 128, 8, 2)
        return Tiles(forward, key_value, forward, square, kib=64, skip_mask=False)
    key_value = Tile(64, 64, 8, 2)
    kib = 96
    if gpu.shared_memory >= 112 * 1024:
        key_value = Tile(128, 64, 8, 2)
        kib = 112
    query = Tile(128, 32, 8, 3)
    square = Tile(32, 32, 4, 2)
    return Tiles(forward, key_value, query, square, kib=kib, skip_mask=False)


def _float32_tiles(small: bool, grouped: bool) -> Tiles:
    """Those without tensor cores, for any GPU. small: head sizes up to 64."""
    if not small:
        tile = Tile(32, 32, 8, 1)
        return Tiles(tile, tile, tile, tile, kib=68, skip_mask=False)
    tile = key_value = Tile(32, 32, 4, 1)
    if grouped:
        key_value = Tile(32, 32, 8, 1)
    return Tiles(Tile(64, 32, 8, 1), key_value, tile, tile, kib=36, skip_mask=False)
