"""Compiles the kernels of `megatron.model.block_kernels` for a GPU, without a GPU:

    python -m tests.support.block_binaries ARCHITECTURE DTYPE HIDDEN_SIZE

prints a JSON object: kernel -> [registers per thread, bytes of stack per thread, bytes of shared memory].
"""

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_counts import disassembled
from megatron.model import block_kernels
from megatron.model.fused_block import row_options

FLOAT32 = {"stats", "sums"}
INTEGERS = {"rows", "size"}


def usage(kernel: Any, architecture: int, dtype: str, **options: Any) -> list[int]:
    """Registers, stack and shared memory of a kernel with all of its optional arguments."""
    warps = options.pop("num_warps")
    names = kernel.arg_names
    types = dict.fromkeys(INTEGERS, "i32") | {"eps": "fp32"} | dict.fromkeys(FLOAT32, "*fp32")
    signature = {name: "constexpr" if name in options else types.get(name, f"*{dtype}") for name in names}
    # Tensors and row sizes are multiples of 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in options and name not in ("eps", "rows")
    }
    constants = {(names.index(name),): value for name, value in options.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    _, registers, stack = disassembled(binary.asm["cubin"])
    return [registers, stack, binary.metadata.shared]


def main() -> None:
    architecture, dtype, hidden_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    tile = {"ROWS": block_kernels.TILE_ROWS, "num_warps": 4}
    columns = block_kernels.TILE_COLUMNS
    cases = [("sums", block_kernels.sum_rows_kernel, {"BLOCK": columns, **tile})]
    for rms in (False, True):
        options = row_options(hidden_size, rms)
        cases.append((f"norm {rms}", block_kernels.norm_kernel, options))
        cases.append((f"norm backward {rms}", block_kernels.norm_backward_kernel, options))
    for name in ("gelu", "gelu_tanh", "relu", "silu"):
        forward = {"ACTIVATION": name, "BLOCK": block_kernels.COLUMNS, "num_warps": 4}
        cases.append((name, block_kernels.activation_kernel, forward))
        backward = {"ACTIVATION": name, "COLUMNS": columns, **tile}
        cases.append((f"{name} backward", block_kernels.activation_backward_kernel, backward))
    for name in ("gelu", "silu"):
        options = {"ACTIVATION": name, "BLOCK": block_kernels.COLUMNS, "num_warps": 4}
        cases.append((f"gated {name}", block_kernels.gated_kernel, options))
        cases.append((f"gated {name} backward", block_kernels.gated_backward_kernel, options))
    print(json.dumps({name: usage(kernel, architecture, dtype, **options) for name, kernel, options in cases}))


if __name__ == "__main__":
    main()
