"""Attention on the CPU: forward and backward in training, and chunks of queries against long keys at evaluation.

    python benchmarks/attention_cpu.py [--threads 2] [--rounds 15] [--busy] [--only tables|dape] [--json FILE]

The baseline is `F.scaled_dot_product_attention` without positions, causal where there are as many queries as keys.
`materialised` is what the original does: the whole score matrix, and the bias beside it. For DAPE-KERPLE it also keeps
what the MLP makes of every pair (8 numbers in, 32 hidden, 4 out); peak memory is that of a process of its own.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.timing import Timing, add_options, apply_options, compare, show, write_json
from kerple.attention import attend, score_table, tables
from kerple.positional import KerpleBiasWeight, KerpleLog, ModelShape, PositionalMethod, Rotary, build

HEADS, SIZE = 4, 64
# Name of a way to run DAPE -> the backend.
DAPE = {"materialised": "reference", "chunked": "chunked"}
# Materialised, it would take tens of GiB from here on.
DAPE_TOO_LONG = 8192


def states(batch: int, heads: int, queries: int, keys: int, size: int, *, train: bool) -> list[Tensor]:
    """Query `[b, h, s, d]`, key and value `[b, h, t, d]`, laid out in memory as a model makes them."""
    torch.manual_seed(0)
    return [
        torch.randn(batch, length, heads, size).transpose(1, 2).requires_grad_(train)
        for length in (queries, keys, keys)
    ]


def training_alternatives(batch: int, heads: int, length: int, size: int) -> dict[str, Callable[[], None]]:
    """Forward and backward, the gradient of the kernel's parameters included."""
    query, key, value = states(batch, heads, length, length, size, train=True)
    upstream = torch.randn(batch, length, heads, size).transpose(1, 2)
    positions = torch.arange(length)
    rotary = Rotary(size)

    def step(forward: Callable[[], Tensor], method: PositionalMethod | None = None) -> Callable[[], None]:
        leaves = [query, key, value, *(method.parameters() if method is not None else ())]
        return lambda: torch.autograd.grad(forward(), leaves, upstream)

    def with_tables(method: PositionalMethod, backend: str) -> Callable[[], None]:
        def forward() -> Tensor:
            bias, weight = tables(method, length, "cpu")
            return attend(query, key, value, bias_table=bias, weight_table=weight, backend=backend)

        return step(forward, method)

    def rotated() -> Tensor:
        return attend(*rotary.rotate(query, key, positions, positions), value)

    return {
        "sdpa, no positions": step(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)),
        "chunked, no positions": step(lambda: attend(query, key, value, backend="chunked")),
        "rotary": step(rotated),
        "kerple_log": with_tables(KerpleLog(heads), "chunked"),
        "kerple_bias_wht": with_tables(KerpleBiasWeight(heads), "chunked"),
        "kerple_log, materialised": with_tables(KerpleLog(heads), "reference"),
    }


def evaluation_alternatives(heads: int, queries: int, keys: int, size: int) -> dict[str, Callable[[], None]]:
    """One chunk of queries at the end of long keys, without gradients."""
    query, key, value = states(1, heads, queries, keys, size, train=False)
    bias, weight = (table.detach() for table in tables(KerpleBiasWeight(heads), keys, "cpu"))
    return {
        # It sees the future of the chunk too, which costs next to nothing.
        "sdpa, no positions": lambda: F.scaled_dot_product_attention(query, key, value),
        "chunked, no positions": lambda: attend(query, key, value, backend="chunked"),
        "bias": lambda: attend(query, key, value, bias_table=bias, backend="chunked"),
        "bias and weight": lambda: attend(query, key, value, bias_table=bias, weight_table=weight, backend="chunked"),
        "bias, window 512": lambda: attend(query, key, value, bias_table=bias, window=512, backend="chunked"),
    }


def dape_step(length: int, backend: str) -> Callable[[], None]:
    """Forward and backward of DAPE-KERPLE at a batch of one, all gradients included."""
    query, key, value = states(1, HEADS, length, length, SIZE, train=True)
    upstream = torch.randn(1, length, HEADS, SIZE).transpose(1, 2)
    method = build("dape_kerple", ModelShape(HEADS, SIZE, HEADS * SIZE, 1, length))
    leaves = [query, key, value, *method.parameters()]

    def step() -> None:
        table = score_table(method, length, "cpu")
        context = attend(query, key, value, modify_scores=method.modify_scores, table=table, backend=backend)
        torch.autograd.grad(context, leaves, upstream)

    return step


def dape_peak(length: int, backend: str, threads: int) -> int:
    """Bytes that a step takes at most, beyond those held before; for a new process."""
    torch.set_num_threads(threads)
    dape_step(16, backend)()
    step = dape_step(length, backend)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the largest resident size is that of now
    before = _largest_resident()
    step()
    return _largest_resident() - before


def _largest_resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def dape_tables(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """Time and peak memory by length, printed."""
    results: dict[str, list[Timing]] = {}
    threads = torch.get_num_threads()
    for length in (512, 2048, 8192):
        ways = {name: backend for name, backend in DAPE.items() if name == "chunked" or length < DAPE_TOO_LONG}
        title = f"DAPE-KERPLE forward + backward, {HEADS} heads of {SIZE}, length {length}"
        if len(ways) > 1:
            steps = {name: dape_step(length, backend) for name, backend in ways.items()}
            results[title] = compare(steps, rounds=max(3, rounds // 3), warmup=1, clock=clock)
            show(title, results[title])
        for name, backend in ways.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
                peak = alone.submit(dape_peak, length, backend, threads).result()
            print(f"{title}, {name}: {peak / 2**20:,.0f} MiB at most")
    return results


def attention_tables(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """All measurements, by title, printed as they come."""
    results: dict[str, list[Timing]] = {}
    for batch, heads, length, size in ((16, 4, 128, 32), (4, 4, 512, 64), (1, 4, 2048, 64)):
        title = f"attention forward + backward, batch {batch}, {heads} heads of {size}, length {length}"
        results[title] = compare(training_alternatives(batch, heads, length, size), rounds=rounds, clock=clock)
        show(title, results[title])
    for queries, keys in ((512, 4096), (512, 65_536), (1, 4096)):
        title = f"attention at evaluation, 4 heads of 64, {queries} queries, {keys} keys"
        results[title] = compare(evaluation_alternatives(4, queries, keys, 64), rounds=max(3, rounds // 3), clock=clock)
        show(title, results[title])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_options(parser)
    parser.add_argument("--only", choices=("tables", "dape"), help="methods of the distance alone, or DAPE alone")
    options = parser.parse_args()
    clock = apply_options(options)
    results: dict[str, list[Timing]] = {}
    if options.only != "dape":
        results |= attention_tables(options.rounds, clock)
    if options.only != "tables":
        results |= dape_tables(options.rounds, clock)
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    main()
