"""Count the instructions of the fused kernels in their machine code. The kernels are compiled, not run: no GPU needed.

    python benchmarks/kernel_counts.py [--check] [--sizes 64 128] [--json FILE]

Compiles for Hopper (sm_90) and bfloat16: without positions, with a bias, with a bias and two jacobian directions
(KERPLE's log kernel in training), and with bias, weight and two directions of each. Reports registers, bytes of stack
(spilled registers), shared memory, and whether matrix products are serialized. For the inner loop and 8,192 pairs of
query and key it reports all instructions, loads (LDG), exponentials (MUFU), and the cycles of the tensor cores at their
peak. In a cycle, a multiprocessor issues 4 instructions, and completes half a warp's exponentials or a warp's load.

`--check` exits with status 1 if a kernel spills more than a few registers or serializes its matrix products.
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
    print("ignoring TRITON_INTERPRET: the kernels are compiled")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kerple.attention.backends.triton import kernels
from kerple.attention.backends.triton.tiles import Gpu, Tile, tiles_for
from megatron.utils.files import write_atomically

# Pointer arguments of the kernels to bfloat16 and to float32.
BFLOAT16 = {"query", "key", "value", "context", "grad_context", "grad_key", "grad_value", "grad_query"}
FLOAT32 = {"bias", "weight", "lse", "row_stats", "bias_tiles", "weight_tiles", "directions", "direction_sums"}
# Multiply-adds of bfloat16 per cycle of a Hopper multiprocessor.
PRODUCTS_PER_CYCLE = 2048
PAIRS = 8192
# Bytes of a thread's stack that `--check` accepts: some Triton versions spill a few registers.
MAX_STACK = 32
# Name -> whether there is a table, whether there is a weight, directions of the bias, directions of the weight.
VARIANTS = {
    "no position": (False, False, 0, 0),
    "bias": (True, False, 0, 0),
    "bias, 2 directions": (True, False, 2, 0),
    "bias and weight, 2 directions each": (True, True, 2, 2),
}


def compiled(kernel, tile: Tile, size: int, table: bool, weight: bool, bias_directions: int, weight_directions: int):
    """Compile a kernel for Hopper, bfloat16 inputs with rows aligned to 16 bytes, and no window."""
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
        aligned = name in BFLOAT16 | FLOAT32 or (re.search("_[bhst]$", name) and name != "table_h")
        if name in constants:
            signature[name] = "constexpr"
        elif name in BFLOAT16 | FLOAT32:
            signature[name] = "*bf16" if name in BFLOAT16 else "*fp32"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in constants.items() if name in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def disassembled(cubin: bytes) -> tuple[list[str], int, int]:
    """(lines of machine code, registers per thread, bytes of stack per thread)."""
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
    """The instructions of the loop with the most matrix products, without those that unmasked tiles jump over."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in lines:
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    jumps = [
        (source, labels[target[1]])
        for source, text in enumerate(instructions)
        if "BRA" in text and (target := re.search(r"`\((\.L_\w+)\)", text)) and target[1] in labels
    ]
    loops = [range(target, source + 1) for source, target in jumps if target <= source]

    def products(loop: range) -> int:
        return sum("HGMMA" in instructions[index] for index in loop)

    most = max(map(products, loops))
    loop = min((loop for loop in loops if products(loop) == most), key=len)
    skipped = {
        index
        for source, target in jumps
        if source in loop and source < target and target in loop
        for index in range(source + 1, target)
        if not any("HGMMA" in instructions[between] for between in range(source + 1, target))
    }
    return [instructions[index] for index in loop if index not in skipped]


def count(kernel, tile: Tile, size: int, variant: tuple, matrices: int) -> dict[str, object]:
    """A row of the table. matrices: the number of matrix products that the kernel computes for each pair."""
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
    """A row per head size, variant and kernel."""
    for size in sizes:
        for name, (table, weight, bias_directions, weight_directions) in VARIANTS.items():
            tiles = tiles_for(Gpu("sm_90", 90, 227 * 1024), torch.bfloat16, size, weight=weight)
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
                counts = count(kernels.sum_tiles_kernel, tiles.tables, size, variant, 2)
                yield {"size": size, "variant": "bias, any table's gradient", "kernel": "tables", **counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail for spilled registers and serialized products")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64], help="head sizes (default: 64)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    results = list(rows(options.sizes))
    title = f"for {PAIRS:,} pairs on sm_90, bfloat16, Triton {triton.__version__}"
    table = Table(*results[0], title=title, title_justify="left")
    for row in results:
        table.add_row(*(f"{value:,}" if type(value) is int else str(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    if options.json:
        write_atomically(options.json, json.dumps(results, indent=1).encode())
    bad = [row for row in results if row["stack"] > MAX_STACK or row["serialized"]]
    for row in bad:
        print(f"{row['kernel']}, {row['variant']}, head size {row['size']}: stack {row['stack']} bytes, ", end="")
        print(f"matrix products {'serialized' if row['serialized'] else 'not serialized'}")
    return 1 if options.check and bad else 0


if __name__ == "__main__":
    sys.exit(main())
