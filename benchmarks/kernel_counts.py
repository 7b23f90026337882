"""What the fused kernels ask of a GPU, counted in their machine code: they are compiled, not run, and need no GPU.

    python benchmarks/kernel_counts.py [--check] [--sizes 64 128] [--json FILE]

For Hopper (sm_90), bfloat16, with no position, a table, a table and two of its directions (KERPLE's log kernel in
training), and bias, weight and two directions of each: registers, bytes of stack (spilled registers), shared memory,
whether the matrix products wait for one another one by one, and the instructions of the inner loop for 8,192 pairs of
query and key: all of them, loads from memory (LDG), exponentials (MUFU), and cycles of the tensor cores at their peak.
A multiprocessor issues 4 instructions, and finishes half a warp's exponential or a warp's load, in a cycle.

`--check` exits with status 1 when a kernel spills more than a few registers or its matrix products are serialized.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if os.environ.pop("TRITON_INTERPRET", "0") != "0":
    print("TRITON_INTERPRET is taken out of the environment: the kernels are compiled")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kerple.attention.backends.triton import kernels
from kerple.attention.backends.triton.launch import Tile, tiles_for
from megatron.utils.files import write_atomically

STATES = {"query", "key", "value", "context", "grad_context", "grad_key", "grad_value", "grad_query"}
SUMS = {"bias", "weight", "lse", "row_stats", "bias_tiles", "weight_tiles", "directions", "direction_sums"}
# Multiply-adds of bfloat16 in a cycle of a Hopper multiprocessor.
PRODUCTS_PER_CYCLE = 2048
PAIRS = 8192
# Bytes of a thread's stack that `--check` lets pass: a few registers, in some of Triton's versions.
MOST_STACK = 32
# Name -> a table, a weight, directions of the bias and of the weight.
VARIANTS = {
    "no position": (False, False, 0, 0),
    "bias": (True, False, 0, 0),
    "bias, 2 directions": (True, False, 2, 0),
    "bias and weight, 2 directions each": (True, True, 2, 2),
}


def compiled(kernel, tile: Tile, size: int, table: bool, weight: bool, bias_directions: int, weight_directions: int):
    """The kernel for Hopper and bfloat16 states of a head size whose rows are aligned to 16 bytes, no window."""
    constants = {
        "SIZE": size,
        "BLOCK_D": max(16, 1 << (size - 1).bit_length()),
        "HAS_TABLE": table,
        "HAS_WEIGHT": weight,
        "HAS_WINDOW": False,
        "BIAS_DIRECTIONS": bias_directions,
        "WEIGHT_DIRECTIONS": weight_directions,
        "GRAD_BIAS": bool(bias_directions),
        "GRAD_WEIGHT": bool(weight_directions),
        "MARGIN": kernels.MARGIN,
        "PRECISION": "tf32",
        "BLOCK": tile.queries,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
    }
    names = kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        aligned = name in STATES | SUMS or (re.search("_[bhst]$", name) and name != "table_h")
        if name in constants:
            signature[name] = "constexpr"
        elif name in STATES | SUMS:
            signature[name] = "*bf16" if name in STATES else "*fp32"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassembled(cubin: bytes) -> tuple[list[str], int, int]:
    """(lines of machine code, registers of a thread, bytes of its stack)."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        code, usage = (
            subprocess.run([tools / tool, *options, path], capture_output=True, text=True, check=True).stdout
            for tool, options in (("nvdisasm", ["-c"]), ("cuobjdump", ["-res-usage"]))
        )
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return code.splitlines(), int(registers), int(stack)


def inner_loop(lines: list[str]) -> list[str]:
    """The instructions of the loop with the most matrix products, without what its middle tiles jump over."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in lines:
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(found[1].strip())
    jumps = [
        (at, labels[target[1]])
        for at, text in enumerate(instructions)
        if "BRA" in text and (target := re.search(r"`\((\.L_\w+)\)", text)) and target[1] in labels
    ]
    loops = [range(to, at + 1) for at, to in jumps if to <= at]

    def products(loop: range) -> int:
        return sum("HGMMA" in instructions[at] for at in loop)

    most = max(map(products, loops))
    loop = min((loop for loop in loops if products(loop) == most), key=len)
    skipped = {
        inside
        for at, to in jumps
        if at in loop and at < to and to in loop
        for inside in range(at + 1, to)
        if not any("HGMMA" in instructions[between] for between in range(at + 1, to))
    }
    return [instructions[at] for at in loop if at not in skipped]


def count(kernel, tile: Tile, size: int, variant: tuple, matrices: int) -> dict[str, object]:
    """A row of the table; `matrices` is how many matrix products the kernel makes of each pair."""
    binary = compiled(kernel, tile, size, *variant)
    lines, registers, stack = disassembled(binary.asm["cubin"])
    opcodes = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for text in inner_loop(lines)]
    kinds = Counter(opcode.split(".")[0] for opcode in opcodes)
    waits = sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in opcodes)
    tiles = PAIRS / (tile.queries * tile.keys) * tile.warps
    return {
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "serialized": waits >= kinds["HGMMA"] > 0,
        "instructions": round(len(opcodes) * tiles),
        "LDG": round(kinds["LDG"] * tiles),
        "MUFU": round(kinds["MUFU"] * tiles),
        "issue cycles": round(len(opcodes) * tiles / 4),
        "tensor cycles": PAIRS * size * matrices // PRODUCTS_PER_CYCLE,
    }


def rows(sizes: list[int]) -> Iterator[dict[str, object]]:
    """A row for each head size, variant and kernel."""
    for size in sizes:
        for name, (table, weight, bias_directions, weight_directions) in VARIANTS.items():
            tiles = tiles_for(torch.bfloat16, size, weight=weight)
            launched = [
                ("forward", kernels.forward_kernel, tiles.forward, 2),
                ("key and value", kernels.key_value_kernel, tiles.key_value, 4),
                ("query", kernels.query_kernel, tiles.query, 3),
            ]
            for kind, kernel, tile, matrices in launched:
                variant = (table, weight, bias_directions, weight_directions)
                yield {"size": size, "variant": name, "kernel": kind, **count(kernel, tile, size, variant, matrices)}
            if name == "bias":
                variant = (table, weight, True, False)
                found = count(kernels.sum_tiles_kernel, tiles.tables, size, variant, 2)
                yield {"size": size, "variant": "bias, any table's gradient", "kernel": "tables", **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail for spilled registers and serialized products")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], help="head sizes (64)")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    found = list(rows(options.sizes))
    title = f"for {PAIRS:,} pairs on sm_90, bfloat16, Triton {triton.__version__}"
    table = Table(*found[0], title=title, title_justify="left")
    for row in found:
        table.add_row(*(f"{value:,}" if type(value) is int else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    if options.json:
        write_atomically(options.json, json.dumps(found, indent=1).encode())
    bad = [row for row in found if row["stack"] > MOST_STACK or row["serialized"]]
    for row in bad:
        print(f"{row['kernel']}, {row['variant']}, head size {row['size']}: stack {row['stack']} bytes, ", end="")
        print(f"matrix products {'serialized' if row['serialized'] else 'in flight'}")
    return 1 if options.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
