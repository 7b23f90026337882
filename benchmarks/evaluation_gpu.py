"""Tokens/s and peak memory of evaluating one sequence on a GPU, at the paper's six lengths, for
several methods.

    python benchmarks/evaluation_gpu.py [--check] [--seconds 90] [--json FILE] [--dry-run]

The model is the recipe's (162M parameters) in bfloat16. Compares the attention backend that `auto`
selects with materialized attention as in the original code. Logits and losses are computed for
1,024 tokens at a time.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gpu import Bench, close_enough
from benchmarks.support.materialized import MATERIALIZED
from benchmarks.support.models import initialized_gpt
from benchmarks.train_step_gpu import model_settings
from kerple.attention import dispatch
from megatron.model.gpt import GPT
from megatron.utils.command_line import run_main

LENGTHS = (512, 1024, 2048, 4096, 8192, 16_384)
ROWS = 1024
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
def losses(model: GPT, text: Tensor) -> Tensor:
    """Loss in nats of each token of a text `[1, s + 1]`, float32 `[s]`."""
    hidden, labels = model.hidden(text[:, :-1])[0], text[0, 1:]
    parts = []
    for states, targets in zip(hidden.split(ROWS), labels.split(ROWS), strict=True):
        parts.append(
            F.cross_entropy(model.logits(states[None])[0].float(), targets, reduction="none")
        )
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
            torch.manual_seed(0)
            text = torch.randint(settings.padded_vocab_size, (1, 50)).to(bench.device)
            results.append(losses(initialized_gpt(settings).to(bench.device, dtype), text))
        good, error = close_enough(results[0], results[1].double(), 1e-5)
        passed &= good
        bench.attempt({"check": pos_emb, "error": error}, dict)
    return bench.record_check(passed)


def main() -> int:
    bench = Bench(__doc__, "evaluation_gpu.json")
    if bench.options.check and not check(bench):
        return 1
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED
    for pos_emb, backend in bench.sized(CASES, CASES[:2]):
        model = initialized_gpt(model_settings(pos_emb, backend, bench.dry))
        model = model.to(bench.device).eval()
        if not bench.dry:
            model.bfloat16()
        for length in bench.sized(LENGTHS, (16, 32)):
            torch.manual_seed(0)
            text = torch.randint(90, (1, length + 1)).to(bench.device)

            def measured(model=model, text=text, length=length) -> dict[str, object]:
                seconds, peak = bench.measure(lambda: losses(model, text))
                return {
                    "ms": seconds * 1e3,
                    "tokens_per_second": length / seconds,
                    "peak_mib": peak / 2**20,
                }

            bench.attempt({"name": pos_emb, "backend": backend, "length": length}, measured)
        del model
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
