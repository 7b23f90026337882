"""Tile sizes of the fused kernels, by GPU."""

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
    """The tile of each kernel. `tables` must be square."""

    forward: Tile
    key_value: Tile
    query: Tile
    tables: Tile


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
        """The GPU of a device. On a CPU, where only the interpreter runs the kernels, it is Hopper."""
        if device.type != "cuda":
            return cls("CPU", 90, 227 * 1024)
        properties = torch.cuda.get_device_properties(device)
        # PyTorch's type stubs lack the attribute shared_memory_per_block_optin.
        shared_memory: int = getattr(properties, "shared_memory_per_block_optin")  # noqa: B009
        return cls(properties.name, 10 * properties.major + properties.minor, shared_memory)


def no_tiles_reason(gpu: Gpu, dtype: torch.dtype | None, head_size: int | None) -> str | None:
    """Why the kernels cannot run on a GPU, as the rest of a sentence; None if they can."""
    if dtype is None or head_size is None:
        return None
    required = shared_memory(dtype, head_size)
    if required > gpu.shared_memory:
        return f"needs {required} bytes of shared memory for {dtype} and head size {head_size}, not {gpu.shared_memory}"
    return None


def tiles_for(gpu: Gpu, dtype: torch.dtype, head_size: int, *, weight: bool) -> Tiles:
    """Tile sizes. They depend on nothing else, so that the order of sums is fixed."""
    if dtype == torch.float32:
        square = Tile(32, 32, 4 if head_size <= 64 else 8, 1)
        return Tiles(Tile(64, 32, 8, 1) if head_size <= 64 else square, square, square, square)
    if head_size <= 64:
        warps = 8 if weight else 4
        return Tiles(Tile(128, 64, warps, 3), Tile(64, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2))
    return Tiles(Tile(128, 64, 8, 2), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2))


def shared_memory(dtype: torch.dtype, head_size: int) -> int:
    """Bytes of shared memory that the kernels need, at most, when compiled for sm_80 or sm_90."""
    kib = (36 if head_size <= 64 else 68) if dtype == torch.float32 else (64 if head_size <= 64 else 128)
    return kib * 1024
