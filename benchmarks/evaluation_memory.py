"""Memory (beyond the weights) and time of evaluating one segment of 16,384 and of 65,536 tokens.

    python benchmarks/evaluation_memory.py [--threads 2] [--lengths 16384 65536] [--pos-emb NAME]
    [--layers N]

The model is that of the training benchmark, by default with kerple_log; from 65,536 tokens on it
has only two layers, since time grows with the square of the length and memory with the number of
layers. Each length is measured in its own process, as the largest resident memory minus that before
the evaluation. The exit status is 1 if it exceeds 2 GiB.
"""

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.results import write_json
from benchmarks.train_step import LAYERS, VOCABULARY, bench_model
from megatron.evaluation.protocols import Segments
from megatron.evaluation.scoring import SegmentReader
from megatron.inference.decoder import as_decoder
from megatron.utils.command_line import run_main

LIMIT = 2 * 1024**3
LONG, LAYERS_WHEN_LONG = 65_536, 2
QUERY_CHUNK = 512


def resident_bytes() -> int:
    """Current resident memory, from /proc."""
    _, pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * resource.getpagesize()


def measure(length: int, threads: int, pos_emb: str, layers: int | None) -> dict[str, float]:
    """Evaluate one segment in this process; returns the additional bytes and the seconds."""
    torch.set_num_threads(threads)
    if layers is None:
        layers = LAYERS
        if length >= LONG:
            layers = LAYERS_WHEN_LONG
    model = bench_model(pos_emb, layers).eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)

    # The weights are in memory before, activations and caches are not.
    before = resident_bytes()
    start = time.perf_counter()
    total = 0.0
    with torch.inference_mode():
        device = torch.device("cpu")
        reader = SegmentReader(as_decoder(model), device, QUERY_CHUNK, batch_tokens=length)
        for chunk in reader.losses(tokens, Segments(length, [0])):
            total += float(chunk.losses.sum())
    seconds = time.perf_counter() - start
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "length": length,
        "layers": len(model.blocks),
        "bytes": largest - before,
        "seconds": seconds,
        "loss": total / length,
    }


def main() -> int:
    # Options.
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, LONG])
    parser.add_argument(
        "--pos-emb", default="kerple_log", metavar="NAME", help="positional method (%(default)s)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help=f"default: {LAYERS}, or {LAYERS_WHEN_LONG} from {LONG:,} tokens on",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()

    # A process for each length: memory of earlier measurements in the same process would hide the
    # peak.
    measurements = []
    exceeded = False
    for length in options.lengths:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            arguments = length, options.threads, options.pos_emb, options.layers
            measured = executor.submit(measure, *arguments).result()
        measurements.append(measured)
        exceeded |= measured["bytes"] > LIMIT
        print(
            f"{options.pos_emb}: evaluation of {length:,} tokens, {measured['layers']} layers: "
            f"{measured['bytes'] / 1024**2:,.0f} MiB beyond the weights (limit "
            f"{LIMIT / 1024**2:,.0f}), {measured['seconds']:.1f} s",
            flush=True,
        )

    # The limit does not depend on the length.
    if options.json:
        write_json(options.json, {"evaluation": measurements, "limit_bytes": LIMIT})
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(run_main(main))
