"""Compiles the loss kernel for every GPU architecture, without a GPU, and prints a JSON row for each binary.

It runs as a script, `python -m tests.support.compiled_loss`, because Triton interprets kernels in the test process.
With `--quick`, it compiles only the kernel of a training step in bfloat16 for A100 and H100.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernel_counts import disassembled
from megatron.model.loss_kernel import BLOCK, WARPS, cross_entropy_kernel

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Name -> constants. The mask is a pointer if it is not None.
VARIANTS = {
    "training": {"MERGED": False, "GRADIENT": True, "mask": None},
    "training with a mask": {"MERGED": False, "GRADIENT": True},
    "evaluation": {"MERGED": False, "GRADIENT": False, "mask": None},
    "slices of the vocabulary": {"MERGED": True, "GRADIENT": True},
}
TYPES = {"labels": "*i64", "mask": "*fp32", "lse": "*fp32", "label_logits": "*fp32", "vocabulary": "i32"}


def compiled(architecture: int, dtype: str, constants: dict[str, object]) -> triton.compiler.CompiledKernel:
    """For a vocabulary that is a multiple of 16."""
    constants = {**constants, "BLOCK": BLOCK}
    types = {**TYPES, "logits": f"*{dtype}", "first_token": "i32"}
    names = cross_entropy_kernel.arg_names
    source = ASTSource(
        fn=cross_entropy_kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name not in constants and name != "first_token"
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": WARPS})


def main() -> None:
    quick = "--quick" in sys.argv
    for name in ["training"] if quick else VARIANTS:
        for architecture in (80, 90) if quick else ARCHITECTURES:
            for dtype in ["bf16"] if quick else ["bf16", "fp16", "fp32"]:
                binary = compiled(architecture, dtype, VARIANTS[name])
                lines, registers, stack = disassembled(binary.asm["cubin"])
                # Loads and stores of logits are those of 16 bytes.
                wide = sum(".128" in line for line in lines)
                row = {"variant": name, "architecture": architecture, "dtype": dtype, "registers": registers}
                print(json.dumps({**row, "stack": stack, "shared": binary.metadata.shared, "wide": wide}))


if __name__ == "__main__":
    main()
