"""Attention on a CPU: forward and backward pass in training, and chunks of queries with many keys
in evaluation.

    python benchmarks/attention_cpu.py [--threads 2] [--rounds 15] [--busy] [--only tables|dape]
    [--json FILE]

The baseline is `F.scaled_dot_product_attention` without positions; it is causal if there are as
many queries as keys. `materialized` stores the full score and bias matrices, as the original code
does. For DAPE-KERPLE this includes all activations of the MLP (8 inputs, 32 hidden units and 4
outputs per pair); its peak memory is measured in a new process.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.attention_inputs import gradient_step, random_states
from benchmarks.support.timing import CpuBench, option_parser
from kerple.attention import Attention, attend, tables
from kerple.positional import (
    KerpleBiasWeight,
    KerpleLog,
    ModelShape,
    Rotary,
    build,
)
from megatron.utils.command_line import run_main

HEADS, SIZE = 4, 64
# Batch size, length and head size in training.
TRAINING_SIZES = [
    (16, 128, 32),
    (4, 512, 64),
    (1, 2048, 64),
]
# Numbers of queries and keys in evaluation.
EVALUATION_LENGTHS = [
    (512, 4096),
    (512, 65_536),
    (1, 4096),
]
DAPE_LENGTHS = (512, 2048, 8192)
# DAPE materialized needs tens of GiB from this length on.
DAPE_MATERIALIZED_LIMIT = 8192
DAPE_BACKENDS = {"materialized": "reference", "chunked": "chunked"}
Step = Callable[[], object]


def training_alternatives(batch: int, length: int, size: int) -> dict[str, Step]:
    """Forward and backward pass, including the gradients of the method's parameters."""
    # The same inputs for all alternatives.
    query, key, value, upstream = random_states(batch, HEADS, length, length, size)
    states = [query, key, value]
    sdpa = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    alternatives = {"sdpa, no positions": gradient_step(sdpa, states, upstream)}

    # This project's attention, as in a layer.
    layers = {
        "chunked, no positions": Attention(None, "chunked"),
        "rotary": Attention(Rotary(size)),
        "kerple_log": Attention(KerpleLog(HEADS), "chunked"),
        "kerple_log, one document per row": Attention(KerpleLog(HEADS), "chunked"),
        "kerple_bias_wht": Attention(KerpleBiasWeight(HEADS), "chunked"),
        "kerple_log, materialized": Attention(KerpleLog(HEADS), "reference"),
    }
    for name, layer in layers.items():
        documents = None
        if name == "kerple_log, one document per row":
            documents = torch.zeros(batch, length, dtype=torch.long)
        forward = partial(layer, *states, documents=documents)
        leaves = [*states, *layer.parameters()]
        alternatives[name] = gradient_step(forward, leaves, upstream)
    return alternatives


def evaluation_alternatives(queries: int, keys: int) -> dict[str, Step]:
    """A chunk of queries at the end of many keys, without gradients."""
    query, key, value, _ = random_states(1, HEADS, queries, keys, SIZE, train=False)
    with torch.no_grad():
        bias, weight = tables(KerpleBiasWeight(HEADS), keys, "cpu")

    # SDPA is not causal here: the additional keys cost almost nothing.
    sdpa = partial(F.scaled_dot_product_attention, query, key, value)
    alternatives: dict[str, Step] = {"sdpa, no positions": sdpa}
    calls: dict[str, dict[str, Any]] = {
        "chunked, no positions": {},
        "bias": {"bias_table": bias},
        "bias and weight": {"bias_table": bias, "weight_table": weight},
        "bias, window 512": {"bias_table": bias, "window": 512},
    }
    for name, options in calls.items():
        alternatives[name] = partial(attend, query, key, value, backend="chunked", **options)
    return alternatives


def dape_step(length: int, backend: str) -> Step:
    """Forward and backward pass of DAPE-KERPLE with batch size 1, including all gradients."""
    *states, upstream = random_states(1, HEADS, length, length, SIZE)
    shape = ModelShape(HEADS, SIZE, HEADS * SIZE, 1, length)
    layer = Attention(build("dape_kerple", shape), backend)
    leaves = [*states, *layer.parameters()]
    return gradient_step(partial(layer, *states), leaves, upstream)


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
    _, _, after = status.partition("VmHWM:")
    kib = int(after.split()[0])
    return kib * 1024


def measure_dape(bench: CpuBench, rounds: int) -> None:
    """Print time and peak memory by length."""
    threads = torch.get_num_threads()
    for length in DAPE_LENGTHS:
        title = f"DAPE-KERPLE forward + backward, {HEADS} heads of {SIZE}, length {length}"
        backends = dict(DAPE_BACKENDS)
        if length >= DAPE_MATERIALIZED_LIMIT:
            del backends["materialized"]
        else:
            steps = {name: dape_step(length, backend) for name, backend in backends.items()}
            bench.measure(title, steps, rounds=rounds, warmup=1)

        # Each in a process of its own.
        for name, backend in backends.items():
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
                peak = executor.submit(dape_peak_memory, length, backend, threads).result()
            print(f"{title}, {name}: peak memory {peak / 2**20:,.0f} MiB")


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--only", choices=("tables", "dape"), help="only methods with tables, or only DAPE"
    )
    bench = CpuBench(parser.parse_args())
    fewer_rounds = max(3, bench.options.rounds // 3)

    # Methods with tables: training, then evaluation.
    if bench.options.only != "dape":
        for batch, length, size in TRAINING_SIZES:
            kind = f"batch {batch}, {HEADS} heads of {size}, length {length}"
            steps = training_alternatives(batch, length, size)
            bench.measure(f"attention forward + backward, {kind}", steps)
        for queries, keys in EVALUATION_LENGTHS:
            kind = f"{HEADS} heads of {SIZE}, {queries} queries, {keys} keys"
            calls = evaluation_alternatives(queries, keys)
            bench.measure(f"attention at evaluation, {kind}", calls, rounds=fewer_rounds)

    # DAPE.
    if bench.options.only != "tables":
        measure_dape(bench, fewer_rounds)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
