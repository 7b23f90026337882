"""Compiles Triton kernels for a GPU, without a GPU, and prints a JSON row for each binary:

    python -m tests.support.compiled_kernels blocks ARCHITECTURE DTYPE HIDDEN_SIZE
    python -m tests.support.compiled_kernels loss [--quick]

`blocks` compiles the kernels of `megatron.model.block_kernels`; `loss` compiles the loss kernel for
every architecture, with `--quick` only that of a training step in bfloat16 for A100 and H100. A
script, because Triton interprets kernels in the test process.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_counts import disassembled
from megatron.model import block_kernels
from megatron.model.fused_block import row_options
from megatron.model.loss_kernel import BLOCK, WARPS, cross_entropy_kernel

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
BLOCK_TYPES = {
    "eps": "fp32",
    **dict.fromkeys(("rows", "size"), "i32"),
    **dict.fromkeys(("stats", "sums"), "*fp32"),
}
LOSS_TYPES = {"labels": "*i64", "vocabulary": "i32", "first_token": "i32"}
LOSS_TYPES |= dict.fromkeys(("mask", "lse", "label_logits"), "*fp32")
# Name -> constants. The mask is a pointer if it is not None.
LOSS_VARIANTS = {
    "training": {"MERGED": False, "GRADIENT": True, "mask": None},
    "training with a mask": {"MERGED": False, "GRADIENT": True},
    "evaluation": {"MERGED": False, "GRADIENT": False, "mask": None},
    "slices of the vocabulary": {"MERGED": True, "GRADIENT": True},
}


def usage(
    kernel: Any,
    architecture: int,
    dtype: str,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    warps: int,
) -> dict[str, int]:
    """What a binary needs: registers and bytes of stack per thread, bytes of shared memory; and its
    number of loads and stores of 16 bytes (`wide`).

    types: of the arguments that are no tensors of `dtype`. Tensors and sizes are multiples of 16.
    """
    names, signature, aligned = kernel.arg_names, {}, {}
    for index, name in enumerate(names):
        signature[name] = "constexpr" if name in constants else types.get(name, f"*{dtype}")
        if name not in constants and name not in ("eps", "rows", "first_token"):
            aligned[index,] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    binary = triton.compile(
        source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps}
    )
    lines, registers, stack = disassembled(binary.asm["cubin"])
    wide = sum(".128" in line for line in lines)
    return {"registers": registers, "stack": stack, "shared": binary.metadata.shared, "wide": wide}


def block_rows(architecture: int, dtype: str, hidden_size: int) -> Iterator[dict[str, Any]]:
    """Every kernel with all of its optional arguments."""
    rows, columns = block_kernels.TILE_ROWS, block_kernels.TILE_COLUMNS
    cases = [("sums", block_kernels.sum_rows_kernel, {"BLOCK": columns, "ROWS": rows})]
    for rms in (False, True):
        options = row_options(
            hidden_size, rms, torch.float32 if dtype == "fp32" else torch.bfloat16
        )
        cases.append((f"norm {rms}", block_kernels.norm_kernel, options))
        cases.append((f"norm backward {rms}", block_kernels.norm_backward_kernel, options))
    for name in ("gelu", "gelu_tanh", "relu", "silu"):
        forward = {"ACTIVATION": name, "BLOCK": block_kernels.COLUMNS}
        cases.append((name, block_kernels.activation_kernel, forward))
        backward = {"ACTIVATION": name, "COLUMNS": columns, "ROWS": rows}
        cases.append((f"{name} backward", block_kernels.activation_backward_kernel, backward))
    for name in ("gelu", "silu"):
        options = {"ACTIVATION": name, "BLOCK": block_kernels.COLUMNS}
        cases.append((f"gated {name}", block_kernels.gated_kernel, options))
        cases.append((f"gated {name} backward", block_kernels.gated_backward_kernel, options))
    for name, kernel, options in cases:
        constants = {option: value for option, value in options.items() if option != "num_warps"}
        warps = options.get("num_warps", 4)
        yield {"kernel": name, **usage(kernel, architecture, dtype, BLOCK_TYPES, constants, warps)}


def loss_rows(quick: bool) -> Iterator[dict[str, Any]]:
    for name in ["training"] if quick else LOSS_VARIANTS:
        constants = {**LOSS_VARIANTS[name], "BLOCK": BLOCK}
        for architecture in (80, 90) if quick else ARCHITECTURES:
            for dtype in ["bf16"] if quick else ["bf16", "fp16", "fp32"]:
                row = usage(cross_entropy_kernel, architecture, dtype, LOSS_TYPES, constants, WARPS)
                yield {"kernel": name, "architecture": architecture, "dtype": dtype, **row}


if __name__ == "__main__":
    part, *words = sys.argv[1:]
    for row in (
        loss_rows("--quick" in words)
        if part == "loss"
        else block_rows(int(words[0]), words[1], int(words[2]))
    ):
        print(json.dumps(row))
