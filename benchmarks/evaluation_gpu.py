"""Tokens/s and peak memory of evaluating one sequence on a GPU, at the paper's six lengths, for
several methods.

    python benchmarks/evaluation_gpu.py [--check] [--seconds 90] [--json FILE] [--dry-run]

The model is the recipe's (162M parameters) in bfloat16. Compares the attention backend that `auto`
selects with materialized attention as in the original code. Logits and losses are computed for
1,024 tokens at a time.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gpu import Bench, Row, close_enough
from benchmarks.support.materialized import MATERIALIZED
from benchmarks.support.models import initialized_gpt, random_batch
from benchmarks.train_step_gpu import model_settings
from kerple.attention import dispatch
from megatron.model.gpt import GPT
from megatron.utils.command_line import run_main

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
ROWS = 1024
# Positional method and attention backend.
CASES = (
    ("none", "auto"),
    ("kerple_log", "auto"),
    ("kerple_bias_wht", "auto"),
    ("alibi", "auto"),
    ("rpe", "auto"),
    ("rotary", "auto"),
    ("kerple_log", "materialized"),
    ("kerple_bias_wht", "materialized"),
)


@torch.no_grad()
def losses(model: GPT, tokens: Tensor, labels: Tensor) -> Tensor:
    """Loss in nats of each label `[1, s]`, float32 `[s]`."""
    hidden = model.hidden(tokens)[0].split(ROWS)
    parts = []
    for states, targets in zip(hidden, labels[0].split(ROWS), strict=True):
        logits = model.logits(states[None])[0].float()
        parts.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(parts)


def check(bench: Bench) -> bool:
    """Compare losses of a small model by the fused kernels in float32 with float64 reference
    attention.
    """
    passed = True
    for pos_emb in ("kerple_log", "kerple_bias_wht"):
        results = []
        for backend, dtype in (("fused", torch.float32), ("reference", torch.float64)):
            settings = model_settings(pos_emb, backend, dry=True)
            text = random_batch(1, 49, settings.padded_vocab_size, bench.device)
            model = initialized_gpt(settings).to(bench.device, dtype)
            results.append(losses(model, *text))
        actual, exact = results
        good, error = close_enough(actual, exact.double(), 1e-5)
        passed &= good
        bench.add({"check": pos_emb, "error": error})
    return bench.record_check(passed)


def measure(bench: Bench, model: GPT, length: int) -> Row:
    text = random_batch(1, length, 90, bench.device)
    seconds, peak = bench.measure(partial(losses, model, *text))
    return {
        "ms": seconds * 1e3,
        "tokens_per_second": length / seconds,
        "peak_mib": peak / 2**20,
    }


def main() -> int:
    # Wrong losses need no measurement.
    bench = Bench(__doc__, "evaluation_gpu.json")
    if bench.options.check and not check(bench):
        return 1

    # A model at a time: each has the weights of 162M parameters.
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED
    for pos_emb, backend in bench.sized(CASES, CASES[:2]):
        model = initialized_gpt(model_settings(pos_emb, backend, bench.dry))
        model = model.to(bench.device).eval()
        if not bench.dry:
            model.bfloat16()
        for length in bench.sized(LENGTHS, (16, 32)):
            row = {"name": pos_emb, "backend": backend, "length": length}
            bench.attempt(row, partial(measure, bench, model, length))
        del model
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
