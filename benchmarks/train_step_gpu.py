"""The training step of the KERPLE paper's model on a GPU (Table 4): seconds, tokens/s, MFU and peak
memory.

    python benchmarks/train_step_gpu.py [--check] [--quick] [--seconds 180] [--json FILE]
    [--dry-run]

The model has 162M parameters (12 layers, hidden size 768, 12 heads, vocabulary 50,304). Sequence
length 512, micro-batch size 32, bfloat16 weights with float32 master weights, gradient clipping at
1.0 and fused AdamW, in a loop that needs only PyTorch and Triton. Every method runs with the
backend that `auto` selects. Without `--quick`, two also run with materialized attention as in the
original. The baseline is a plain GPT of the same size without positions. MFU counts 6 x parameters
outside the input embedding + 6 x layers x hidden size x length per token, relative to the dense
bf16 peak; recomputation is not counted.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.gpu import Bench, Row, close_enough
from benchmarks.support.materialized import MATERIALIZED
from benchmarks.support.models import (
    PlainConfig,
    PlainDecoder,
    initialized_gpt,
    random_batch,
)
from kerple.attention import dispatch
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.flops import count_parameters, flops_per_token, peak_flops
from megatron.utils.command_line import run_main

METHODS = (
    "none",
    "kerple_log",
    "kerple_power",
    "kerple_bias_wht",
    "alibi",
    "rpe",
    "rotary",
    "sinusoidal",
)
QUICK_METHODS = ("none", "kerple_log", "alibi", "rpe", "rotary")
COMPARED = ("kerple_log", "kerple_bias_wht")


def model_settings(pos_emb: str, backend: str, dry: bool) -> ModelSettings:
    # Layers, hidden size, heads, length.
    sizes = 12, 768, 12, 512
    vocabulary = 50_304
    if dry:
        sizes = 1, 32, 2, 16
        vocabulary = 96
    config: Any = PlainConfig(*sizes, pos_emb=pos_emb, attention_backend=backend)
    return ModelSettings(config, vocabulary)


def training_step(
    model: GPT | PlainDecoder, tokens: Tensor, labels: Tensor
) -> Callable[[], Tensor]:
    """Mixed precision as in training: bfloat16 weights, float32 master weights. Never synchronizes
    with the GPU.
    """
    model.bfloat16()
    weights: list[Tensor] = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=6e-4, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        value = model.loss(tokens, labels)
        value.backward()

        # Clip the gradients, in float32.
        gradients = [weight.grad.float() for weight in weights if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = 1.0 / (norm + 1e-6)
        torch._foreach_mul_(gradients, factor.clamp(max=1.0))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        model.zero_grad(set_to_none=True)
        return value.detach()

    return step


def check(bench: Bench) -> bool:
    """Compare the gradients of the fused kernels in float32 with the reference in float64, for one
    small layer.
    """
    all_passed = True
    for pos_emb in ("kerple_log", "kerple_bias_wht", "rpe"):
        gradients = []
        for backend, dtype in (("fused", torch.float32), ("reference", torch.float64)):
            # The same weights and text for both.
            settings = model_settings(pos_emb, backend, dry=True)
            model = initialized_gpt(settings).to(bench.device, dtype)
            tokens, labels = random_batch(2, 16, settings.padded_vocab_size, bench.device)
            loss = model.loss(tokens, labels)
            parameters = list(model.parameters())
            gradients.append(torch.autograd.grad(loss, parameters))

        # Every parameter has an error.
        passed = True
        largest = 0.0
        for actual, exact in zip(*gradients, strict=True):
            close, error = close_enough(actual, exact.double(), 1e-3)
            passed &= close
            largest = max(largest, error)
        all_passed &= passed
        bench.add({"check": pos_emb, "ok": passed, "largest_error": largest})
    return bench.record_check(all_passed)


def measure(bench: Bench, name: str, backend: str | None, plain: float | None) -> Row:
    """The rates and memory of a case. backend: None for the plain GPT. plain: its seconds, or None
    if they are not known.
    """
    settings = model_settings(name, backend or "auto", bench.dry)
    config = settings.config
    batch, length = bench.sized(32, 2), config.shape.max_positions
    tokens, labels = random_batch(batch, length, settings.padded_vocab_size, bench.device)

    # The model, and its parameters outside of the embedding, which count as arithmetic.
    model: GPT | PlainDecoder
    if backend is None:
        model = plain_decoder(settings).to(bench.device)
        outside = -model.embedding.weight.numel()
        outside += sum(each.numel() for each in model.parameters())
    else:
        model = initialized_gpt(settings).to(bench.device)
        outside = count_parameters(model.layers(), settings)["outside_embedding"]

    # Steps with the optimizer, for about three seconds.
    step = training_step(model, tokens, labels)
    seconds, _ = bench.measure(step, seconds=3)
    per_second = batch * length / seconds
    if backend is None:
        plain = seconds

    # Rates, and memory with the optimizer states.
    mfu = peak_gib = ratio = None
    peak = peak_flops(bench.device)
    if peak is not None:
        mfu = per_second * flops_per_token(outside, config, length) / peak
    if not bench.dry:
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
    if plain is not None:
        ratio = seconds / plain
    return {
        "seconds_per_step": seconds,
        "tokens_per_second": per_second,
        "mfu": mfu,
        "peak_gib": peak_gib,
        "ratio_to_plain": ratio,
    }


def plain_decoder(settings: ModelSettings) -> PlainDecoder:
    """A plain GPT of the same size."""
    config = settings.config
    return PlainDecoder(
        settings.padded_vocab_size,
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
    )


def main() -> int:
    # Wrong gradients need no measurement.
    bench = Bench(__doc__, "train_step_gpu.json")
    if bench.options.check and not check(bench):
        return 1
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED

    # The plain GPT, whose attention is PyTorch's. The others are compared with it.
    row = {"name": "plain GPT", "backend": "sdpa"}
    measured = bench.attempt(row, partial(measure, bench, "none", None, None)) or {}
    plain = measured.get("seconds_per_step")

    # Each method, then another way to compute a few of them.
    cases = [(method, "auto") for method in METHODS]
    cases += [(method, "materialized") for method in COMPARED]
    if bench.options.quick:
        cases = [(method, "auto") for method in QUICK_METHODS]
    if bench.dry:
        cases = cases[:2]
    for name, backend in cases:
        # A failed case does not end the benchmark.
        if not bench.dry:
            torch.cuda.empty_cache()
        row = {"name": name, "backend": backend}
        bench.attempt(row, partial(measure, bench, name, backend, plain))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
