"""Attention on a CPU: forward and backward pass in training, and chunks of queries with many keys
in evaluation.

    python benchmarks/attention_cpu.py [--threads 2] [--rounds 15] [--busy] [--only tables|dape]
    [--json FILE]

The baseline is `F.scaled_dot_product_attention` without positions; it is causal if there are as
many queries as keys. `materialized` stores the full score and bias matrices, as the original code
does. For DAPE-KERPLE this includes all activations of the MLP (8 inputs, 32 hidden units and 4
outputs per pair); its peak memory is measured in a new process.
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

from benchmarks.support.attention_inputs import attend_with_method, random_states
from benchmarks.support.timing import Timing, add_options, apply_options, compare, show, write_json
from kerple.attention import Attention, Documents, attend, tables
from kerple.positional import (
    KerpleBiasWeight,
    KerpleLog,
    ModelShape,
    PositionalMethod,
    Rotary,
    build,
)
from megatron.utils.command_line import run_main

HEADS, SIZE = 4, 64
# DAPE materialized needs tens of GiB from this length on.
DAPE_MATERIALIZED_LIMIT = 8192


def training_alternatives(
    batch: int, heads: int, length: int, size: int
) -> dict[str, Callable[[], object]]:
    """Forward and backward pass, including the gradients of the method's parameters."""
    # The same inputs for all alternatives.
    query, key, value, upstream = random_states(batch, heads, length, length, size)
    positions = torch.arange(length)
    rotary, log = Rotary(size), KerpleLog(heads)
    ids = torch.zeros(batch, length, dtype=torch.long)

    def one_document() -> Tensor:
        return Attention(log, "chunked")(query, key, value, documents=Documents(ids))

    def step(
        forward: Callable[[], Tensor], method: PositionalMethod | None = None
    ) -> Callable[[], object]:
        leaves = [query, key, value]
        if method is not None:
            leaves += method.parameters()
        return lambda: torch.autograd.grad(forward(), leaves, upstream)

    def method_step(method: PositionalMethod, backend: str) -> Callable[[], object]:
        return step(lambda: attend_with_method(method, query, key, value, backend=backend), method)

    return {
        "sdpa, no positions": step(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
        ),
        "chunked, no positions": step(lambda: attend(query, key, value, backend="chunked")),
        "rotary": step(lambda: attend(*rotary.rotate(query, key, positions, positions), value)),
        "kerple_log": method_step(KerpleLog(heads), "chunked"),
        "kerple_log, one document per row": step(one_document, log),
        "kerple_bias_wht": method_step(KerpleBiasWeight(heads), "chunked"),
        "kerple_log, materialized": method_step(KerpleLog(heads), "reference"),
    }


def evaluation_alternatives(
    heads: int, queries: int, keys: int, size: int
) -> dict[str, Callable[[], object]]:
    """A chunk of queries at the end of many keys, without gradients."""
    query, key, value, _ = random_states(1, heads, queries, keys, size, train=False)
    with torch.no_grad():
        bias, weight = tables(KerpleBiasWeight(heads), keys, "cpu")
    return {
        # Not causal: the additional keys cost almost nothing.
        "sdpa, no positions": lambda: F.scaled_dot_product_attention(query, key, value),
        "chunked, no positions": lambda: attend(query, key, value, backend="chunked"),
        "bias": lambda: attend(query, key, value, bias_table=bias, backend="chunked"),
        "bias and weight": lambda: attend(
            query, key, value, bias_table=bias, weight_table=weight, backend="chunked"
        ),
        "bias, window 512": lambda: attend(
            query, key, value, bias_table=bias, window=512, backend="chunked"
        ),
    }


def dape_step(length: int, backend: str) -> Callable[[], None]:
    """Forward and backward pass of DAPE-KERPLE with batch size 1, including all gradients."""
    query, key, value, upstream = random_states(1, HEADS, length, length, SIZE)
    method = build("dape_kerple", ModelShape(HEADS, SIZE, HEADS * SIZE, 1, length))
    leaves = [query, key, value, *method.parameters()]

    def step() -> None:
        torch.autograd.grad(
            attend_with_method(method, query, key, value, backend=backend), leaves, upstream
        )

    return step


def dape_peak_memory(length: int, backend: str, threads: int) -> int:
    """Peak memory of a step in bytes, above what was in use. Call it in a new process."""
    torch.set_num_threads(threads)
    dape_step(16, backend)()
    step = dape_step(length, backend)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: reset the peak resident size
    before = peak_resident_size()
    step()
    return peak_resident_size() - before


def peak_resident_size() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def benchmark_dape(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """Print time and peak memory by length; return the times by title."""
    results: dict[str, list[Timing]] = {}
    threads = torch.get_num_threads()
    for length in (512, 2048, 8192):
        backends = {"materialized": "reference", "chunked": "chunked"}
        if length >= DAPE_MATERIALIZED_LIMIT:
            del backends["materialized"]
        title = f"DAPE-KERPLE forward + backward, {HEADS} heads of {SIZE}, length {length}"
        if len(backends) > 1:
            steps = {name: dape_step(length, backend) for name, backend in backends.items()}
            results[title] = compare(steps, rounds=max(3, rounds // 3), warmup=1, clock=clock)
            show(title, results[title])
        for name, backend in backends.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
                peak = executor.submit(dape_peak_memory, length, backend, threads).result()
            print(f"{title}, {name}: peak memory {peak / 2**20:,.0f} MiB")
    return results


def benchmark_tables(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """Print the times of methods with tables; return them by title."""
    results: dict[str, list[Timing]] = {}
    for batch, heads, length, size in ((16, 4, 128, 32), (4, 4, 512, 64), (1, 4, 2048, 64)):
        title = (
            f"attention forward + backward, batch {batch}, {heads} heads of {size}, length {length}"
        )
        results[title] = compare(
            training_alternatives(batch, heads, length, size), rounds=rounds, clock=clock
        )
        show(title, results[title])
    for queries, keys in ((512, 4096), (512, 65_536), (1, 4096)):
        title = f"attention at evaluation, 4 heads of 64, {queries} queries, {keys} keys"
        results[title] = compare(
            evaluation_alternatives(4, queries, keys, 64), rounds=max(3, rounds // 3), clock=clock
        )
        show(title, results[title])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add_options(parser)
    parser.add_argument(
        "--only", choices=("tables", "dape"), help="only methods with tables, or only DAPE"
    )
    options = parser.parse_args()
    clock = apply_options(options)
    results: dict[str, list[Timing]] = {}
    if options.only != "dape":
        results |= benchmark_tables(options.rounds, clock)
    if options.only != "tables":
        results |= benchmark_dape(options.rounds, clock)
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    sys.exit(run_main(main))
