"""Three training steps of the 162M recipe through `Engine` on one GPU. In the third one, every wait
for the device is an error.

    python benchmarks/engine_gpu.py [--json FILE] [--dry-run]

The first two steps may wait, for compilation and self-checks. Needs DeepSpeed, megatron-core and
pydantic. `--dry-run` trains a small model on a CPU, where nothing waits.
"""

import itertools
import sys
import time
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gpu import Bench, Row
from benchmarks.support.models import random_batch

DRY_RUN = [
    "distributed-backend=gloo",
    "seq-length=16",
    "max-position-embeddings=16",
    "train_micro_batch_size_per_gpu=2",
    "num-layers=1",
    "hidden-size=32",
    "num-attention-heads=2",
]


def train_steps(dry: bool) -> Row:
    """The loss and seconds of the last step."""
    from megatron.config import load_config
    from megatron.training.distributed import initialize
    from megatron.training.engine import build_engine

    # The recipe, or a small model on a CPU.
    overrides, vocabulary = [], 50_257
    if dry:
        overrides, vocabulary = DRY_RUN, 96
    files = ["small_bf16.yml", "pos_emb/kerple_log.yml"]
    config = load_config(files, Path("configs"), overrides)
    layout = initialize(config)
    engine = build_engine(config, vocabulary, layout, print)

    # A batch as the data loader gives it, for all steps.
    tokens, labels = random_batch(engine.micro_batch, config.model.seq_length, 96)
    if not dry:
        tokens, labels = tokens.pin_memory(), labels.pin_memory()
    batches = itertools.repeat({"tokens": tokens, "labels": labels})
    for iteration in range(2):
        engine.train_step(batches, 1e-4, iteration)

    # In the third step, a wait for the device is an error.
    if not dry:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    try:
        loss = engine.train_step(batches, 1e-4, 2)
    finally:
        if not dry:
            torch.cuda.set_sync_debug_mode("default")
    if not dry:
        torch.cuda.synchronize()
    return {"loss": loss.item(), "seconds": time.perf_counter() - started}


def main() -> int:
    bench = Bench(__doc__, "engine_gpu.json")
    title = {"engine": "third step without a host synchronization"}
    row = bench.attempt(title, partial(train_steps, bench.dry))
    return int(row is None or "failed" in row)


if __name__ == "__main__":
    sys.exit(main())
