"""Memory and time of evaluating 16,384 tokens in one segment, beyond what the model's weights take.

    python benchmarks/evaluation_memory.py [--threads 2] [--length 16384] [--json FILE]

The model of the training benchmark with kerple_log. What counts is the largest resident memory of a process of its
own minus what it held before the evaluation; 2 GiB are allowed. Exit status 1 when it takes more.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.train_step import VOCABULARY, our_model
from megatron.evaluation.protocols import Segments
from megatron.evaluation.scoring import score
from megatron.inference.decoder import as_decoder

LIMIT = 2 * 1024**3
QUERY_CHUNK = 512


def resident_bytes() -> int:
    """Resident memory now, from Linux's /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(length: int, threads: int) -> dict[str, float]:
    """Evaluate one segment in this process; bytes beyond those held before, and seconds."""
    torch.set_num_threads(threads)
    model = our_model("kerple_log").eval()
    tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=torch.Generator().manual_seed(1))
    held = resident_bytes()
    start = time.perf_counter()
    with torch.inference_mode():
        losses = [
            scored.losses.sum()
            for scored in score(
                as_decoder(model),
                tokens,
                Segments(length, range(0, length, length)),
                window=None,
                query_chunk=QUERY_CHUNK,
                batch_tokens=length,
                device=torch.device("cpu"),
            )
        ]
    seconds = time.perf_counter() - start
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"length": length, "bytes": largest - held, "seconds": seconds, "loss": float(sum(losses)) / length}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        print(json.dumps(measure(options.length, options.threads)))
        return 0
    # A process of its own: what earlier work left behind would hide the peak.
    command = [
        sys.executable,
        __file__,
        "--in-this-process",
        f"--length={options.length}",
        f"--threads={options.threads}",
    ]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured = json.loads(output.splitlines()[-1])
    print(
        f"evaluation of {measured['length']:,} tokens: {measured['bytes'] / 1024**2:,.0f} MiB beyond the weights "
        f"(limit {LIMIT / 1024**2:,.0f}), {measured['seconds']:.1f} s"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"evaluation": measured, "limit_bytes": LIMIT}, indent=1) + "\n")
    return 0 if measured["bytes"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
