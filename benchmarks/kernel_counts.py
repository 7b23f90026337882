"""Count the instructions of the fused kernels in their machine code. The kernels are compiled, not
run: no GPU needed.

    python benchmarks/kernel_counts.py [--check] [--arch 80 86 89 90 100 120] [--sizes 64 128]
    [--grouped] [--documents] [--json FILE]

Compiles for Hopper (sm_90) or other architectures, in bfloat16: without positions, with a decay
(forgetting attention), with a bias, with a bias and two jacobian directions (KERPLE's log kernel in
training), and with bias, weight and two directions of each. Reports registers, bytes of stack
(spilled registers), spills in the inner loop, shared memory, and whether matrix products are
serialized. For the inner loop and 8,192 pairs of query and key it reports all instructions, loads
(LDG), exponentials (MUFU), the cycles in which shared memory delivers the operands of the tensor
cores (LDSM; only mma.sync needs them), and the cycles of the tensor cores at their peak. In a
cycle, a multiprocessor issues 4 instructions, and completes half a warp's exponentials or a warp's
load.

`--check` exits with status 1 if a kernel spills more than a few registers, serializes its matrix
products, or needs more shared memory than the GPU has or `tiles_for` states.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from kerple.attention.backends.triton import gradient_kernels, kernels, table_kernels
from kerple.attention.backends.triton.tiles import Gpu, Tile, Tiles, tiles_for
from megatron.utils.command_line import run_main
from megatron.utils.files import write_atomically

# Pointer arguments of the kernels to the dtype of the states and to float32.
STATES = {
    "query",
    "key",
    "value",
    "context",
    "grad_context",
    "grad_key",
    "grad_value",
    "grad_query",
}
FLOAT32 = {
    "bias",
    "weight",
    "lse",
    "row_stats",
    "bias_tiles",
    "weight_tiles",
    "directions",
    "direction_sums",
    "decay",
    "bases",
    "column_sums",
    "row_sums",
}
INTEGERS = {"documents", "tile_counts"}
# Strides that may not be multiples of 16.
UNALIGNED_STRIDES = {"table_h", "bases_h"}
# Architecture -> KiB of shared memory per program, and multiply-adds of bfloat16 per cycle of a
# multiprocessor. With float32 sums, GeForce cards (sm_86, sm_89, sm_120) compute half as many.
ARCHITECTURES = {
    80: (163, 1024),
    86: (99, 512),
    89: (99, 512),
    90: (227, 2048),
    100: (227, 4096),
    120: (99, 512),
}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
# Matrix instructions of mma.sync, wgmma and tcgen05.
MATRIX = {"HMMA", "HGMMA", "UTCHMMA"}
# Columns of tensor memory of a multiprocessor.
TENSOR_MEMORY = 512
PAIRS = 8192
# Bytes of a thread's stack that `--check` accepts: some Triton versions spill a few registers.
MAX_STACK = 32
# Limit for spills outside the inner loop only, and for the kernel for any table's gradient, which
# holds a tile of sums per table in registers: on sm_8x and sm_120, up to 3 % of the instructions of
# its loop are spills at head size 64, but tiles without spills (32 x 32) need more than twice as
# many instructions. The same limit holds for the kernel for keys and values with grouped-query
# attention, where the loop over query heads needs a few more registers.
MAX_STACK_OUTSIDE_LOOP = MAX_STACK_TABLES = 96
# The latter with a decay, in float32 at head size 128: on sm_90, sm_100 and sm_120, 2 to 4 % of the
# loop are spills.
MAX_STACK_FLOAT32_DECAY = 352
Row = dict[str, Any]
# Name -> whether there is a decay, a table and a weight, directions of the bias, directions of the
# weight.
VARIANTS = {
    "no position": (False, False, False, 0, 0),
    "decay": (True, False, False, 0, 0),
    "bias": (False, True, False, 0, 0),
    "bias, 2 directions": (False, True, False, 2, 0),
    "bias and weight, 2 directions each": (False, True, True, 2, 2),
}


@dataclass(frozen=True)
class Case:
    """What the kernels are compiled for; decay, table, weight and directions as in `VARIANTS`."""

    architecture: int
    dtype: str
    size: int
    window: bool
    grouped: bool
    decay: bool
    table: bool
    weight: bool
    bias_directions: int
    weight_directions: int
    documents: bool = False

    @property
    def tiles(self) -> Tiles:
        name = f"sm_{self.architecture}"
        kib, _ = ARCHITECTURES[self.architecture]
        return tiles_for(
            Gpu(name, self.architecture, kib * 1024),
            DTYPES[self.dtype],
            self.size,
            weight=self.weight,
            grouped=self.grouped,
            documents=self.documents,
        )


def compiled(kernel, tile: Tile, case: Case):
    """Compile a kernel for inputs with rows aligned to 16 bytes."""
    # Arguments that Triton compiles into the code.
    constants = {
        "SIZE": case.size,
        "BLOCK_D": max(16, 1 << (case.size - 1).bit_length()),
        "HAS_TABLE": case.table or not case.tiles.skip_mask,
        "HAS_DECAY": case.decay,
        "HAS_WEIGHT": case.weight,
        "HAS_WINDOW": case.window,
        "HAS_DOCUMENTS": case.documents,
        "BIAS_DIRECTIONS": case.bias_directions,
        "WEIGHT_DIRECTIONS": case.weight_directions,
        "GRAD_BIAS": case.table,
        "GRAD_WEIGHT": case.weight,
        "MARGIN": kernels.MARGIN,
        "PRECISION": case.tiles.precision,
        "BLOCK": tile.queries,
        "BLOCK_M": tile.queries,
        "BLOCK_N": tile.keys,
    }
    if not case.grouped:
        # As Triton does for an argument that is 1.
        constants["group"] = 1

    # Types of the other arguments, as the launcher passes them, and their alignment.
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[index,] = constants[name]
            continue
        signature[name] = argument_type(name, case.dtype)
        is_stride = re.search("_[bhst]$", name) and name not in UNALIGNED_STRIDES
        if name in STATES | FLOAT32 or is_stride:
            attributes[index,] = [["tt.divisibility", 16]]

    # Compile for the architecture, without a GPU.
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    target = GPUTarget("cuda", case.architecture, 32)
    return triton.compile(source, target=target, options=options)


def argument_type(name: str, dtype: str) -> str:
    """Triton's type of an argument that is no constant."""
    if name in STATES:
        return f"*{dtype}"
    if name in FLOAT32:
        return "*fp32"
    if name in INTEGERS:
        return "*i32"
    if name.startswith("scale"):
        return "fp32"
    return "i32"


def disassembled(cubin: bytes) -> tuple[list[str], int, int]:
    """(lines of machine code, registers per thread, bytes of stack per thread)."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        outputs = []
        for tool, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage")):
            command = [f"{tools}/{tool}", option, str(path)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            outputs.append(run.stdout)
    code, usage = outputs
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    return code.splitlines(), int(registers), int(stack)


def opcode(instruction: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def inner_loop(lines: list[str], matrix: set[str]) -> list[str]:
    """The loop with the most matrix products, without what unmasked tiles jump over."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    for line in lines:
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1].strip())
    is_product = [opcode(text).split(".")[0] in matrix for text in instructions]

    # Jumps, as indices of instructions.
    jumps = []
    for source, text in enumerate(instructions):
        target = re.search(r"`\((\.L_\w+)\)", text)
        if "BRA" in text and target and target[1] in labels:
            jumps.append((source, labels[target[1]]))
    # After the end there are only loops that wait for a barrier, and jumps back from these.
    end = next(index for index, text in enumerate(instructions) if text.startswith("EXIT"))
    loops = [range(target, source + 1) for source, target in jumps if target <= source < end]

    # Of the loops with the most products, the shortest one.
    def products(loop: range) -> int:
        return sum(is_product[loop.start : loop.stop])

    loop = max(loops, key=lambda loop: (products(loop), -len(loop)))

    # What a jump inside the loop skips, unless there is a product.
    skipped: set[int] = set()
    for source, stop in jumps:
        if source not in loop or stop not in loop or stop <= source:
            continue
        if not any(is_product[source + 1 : stop]):
            skipped.update(range(source + 1, stop))
    return [instructions[index] for index in loop if index not in skipped]


def is_serialized(opcodes: list[str], matrices: int) -> bool:
    """Whether a program waits for each matrix product before it issues the next one.

    wgmma: there are as many waits as instructions. If each product is a single instruction (head
    size 16), the numbers are equal anyway. tcgen05: between any two products of the loop there is a
    wait. mma.sync is never asynchronous: the other warps fill its gaps.
    """
    products = sum(code.startswith("HGMMA") for code in opcodes)
    if products:
        waits = sum(code.startswith("WARPGROUP.DEPBAR") for code in opcodes)
        return waits >= products > matrices

    # Groups of products that follow a wait; the loop begins with what its end leaves.
    is_event = ("UTCHMMA", "SYNCS.PHASECHK")
    events = [code[:5] for code in opcodes if code.startswith(is_event)]
    groups = sum(event == "UTCHM" != events[index - 1] for index, event in enumerate(events))
    return groups >= matrices > 1


def count(kernel, tile: Tile, case: Case, matrices: int) -> Row:
    """Part of a row of the table. matrices: number of matrix products for each pair."""
    binary = compiled(kernel, tile, case)
    lines, registers, stack = disassembled(binary.asm["cubin"])
    products = MATRIX
    if case.dtype == "fp32":
        products = {"FFMA", "FFMA2"}
    opcodes = [opcode(text) for text in inner_loop(lines, products)]
    kinds = Counter(code.split(".")[0] for code in opcodes)
    tiles = PAIRS / (tile.queries * tile.keys) * tile.warps
    _, products_per_cycle = ARCHITECTURES[case.architecture]
    return {
        "tile": f"{tile.queries}x{tile.keys}",
        "warps": tile.warps,
        "registers": registers,
        "stack": stack,
        "spills in loop": kinds["LDL"] + kinds["STL"],
        "shared": binary.metadata.shared,
        "tensor memory": getattr(binary.metadata, "tmem_size", 0),
        "serialized": is_serialized(opcodes, matrices),
        "instructions": round(len(opcodes) * tiles),
        "LDG": round(kinds["LDG"] * tiles),
        "MUFU": round(kinds["MUFU"] * tiles),
        "issue cycles": round(len(opcodes) * tiles / 4),
        # LDSM.M88.4 reads 512 bytes, shared memory delivers 128 per cycle.
        "LDSM cycles": round(kinds["LDSM"] * tiles * 4),
        "tensor cycles": PAIRS * case.size * matrices // products_per_cycle,
    }


def rows(cases: Iterable[tuple[str, Case]]) -> Iterator[Row]:
    """A row per case, named by its variant, and kernel."""
    for name, case in cases:
        tiles = case.tiles
        if not (case.decay or case.table or tiles.skip_mask):
            continue  # these kernels look up a table of zeros
        launched = [
            ("forward", kernels.forward_kernel, tiles.forward, 2),
            ("key and value", gradient_kernels.key_value_kernel, tiles.key_value, 4),
            ("query", gradient_kernels.query_kernel, tiles.query, 3),
        ]
        # The kernel for any table's gradient does not depend on directions and windows.
        if not case.window and (case.weight or (case.table and not case.bias_directions)):
            launched.append(("tables", table_kernels.sum_tiles_kernel, tiles.tables, 2))
        for kind, kernel, tile, matrices in launched:
            yield {
                "arch": case.architecture,
                "dtype": case.dtype,
                "size": case.size,
                "window": case.window,
                "grouped": case.grouped,
                "variant": name,
                "kernel": kind,
                **count(kernel, tile, case, matrices),
                "limit": tiles.kib,
            }


def problems(row: Row) -> list[str]:
    """What `--check` rejects about a row."""
    # Spills outside the loop cost little; some kernels are known to spill more.
    limit = MAX_STACK_OUTSIDE_LOOP
    if row["spills in loop"]:
        limit = MAX_STACK
    if row["kernel"] == "tables" or (row["grouped"] and row["kernel"] == "key and value"):
        limit = MAX_STACK_TABLES
        kind = row["variant"], row["dtype"], row["size"]
        if kind == ("decay", "fp32", 128):
            limit = MAX_STACK_FLOAT32_DECAY

    # Everything that is wrong.
    stack, shared, columns = row["stack"], row["shared"], row["tensor memory"]
    kib = row["limit"]
    available, _ = ARCHITECTURES[row["arch"]]
    found = []
    if stack > limit:
        found.append(f"spills {stack} bytes per thread, more than {limit}")
    if row["serialized"]:
        found.append("serializes its matrix products")
    if shared > kib * 1024:
        found.append(f"needs {shared} bytes of shared memory, not {kib} KiB")
    if kib > available:
        found.append(f"needs {kib} KiB of shared memory; the GPU has {available}")
    if columns > TENSOR_MEMORY:
        found.append(f"needs {columns} columns of tensor memory")
    return found


def show(results: list[Row]) -> None:
    """Print the rows; settings that all of them share are in the title."""
    keys = ("arch", "dtype", "window", "grouped")
    shared = [key for key in keys if len({row[key] for row in results}) == 1]
    settings = ", ".join(f"{key} {results[0][key]}" for key in shared)
    title = f"for {PAIRS:,} pairs, {settings}, Triton {triton.__version__}"
    columns = [key for key in results[0] if key not in (*shared, "limit")]
    table = Table(*columns, title=title, title_justify="left")
    for row in results:
        texts = []
        for key in columns:
            text = str(row[key])
            if type(row[key]) is int:
                text = f"{row[key]:,}"
            texts.append(text)
        table.add_row(*texts)

    # Output to a file is not wrapped.
    width = None
    if not sys.stdout.isatty():
        width = 220
    Console(width=width).print(table)


def main() -> int:
    # Options.
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="fail for spilled registers and serialized products"
    )
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[90], choices=ARCHITECTURES, help="default: 90"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64], help="head sizes (default: 64)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["bf16"], choices=DTYPES, help="default: bf16"
    )
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="default: all"
    )
    parser.add_argument("--window", action="store_true", help="with a window")
    parser.add_argument("--grouped", action="store_true", help="with grouped-query attention")
    parser.add_argument("--documents", action="store_true", help="with several documents in a row")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()

    # Compile all combinations.
    cases = []
    kinds = itertools.product(options.arch, options.dtypes, options.sizes, options.variants)
    for arch, dtype, size, name in kinds:
        flags = options.window, options.grouped, *VARIANTS[name], options.documents
        cases.append((name, Case(arch, dtype, size, *flags)))
    results = list(rows(cases))
    show(results)
    if options.json:
        write_atomically(options.json, json.dumps(results, indent=1).encode())

    # Problems fail only with `--check`.
    found = False
    for row in results:
        kernel = f"sm_{row['arch']}, {row['dtype']}, head size {row['size']}, {row['variant']}"
        for message in problems(row):
            print(f"{kernel}: {row['kernel']} {message}")
            found = True
    return int(options.check and found)


if __name__ == "__main__":
    sys.exit(run_main(main))
