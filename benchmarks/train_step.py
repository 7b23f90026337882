"""A CPU training step with each positional method, compared with a plain PyTorch decoder of the
same size.

    python benchmarks/train_step.py [--threads 2] [--rounds 15] [--busy] [--json FILE]

The model has 4 layers, hidden size 256, 4 heads, sequence length 512, batch size 4 and vocabulary
8,192. A step is forward, loss, backward and fused AdamW. The limits are 1.10 times the plain
decoder's time without a bias and 1.25 times with one.

A second set of tables compares the model with the same model computed as in the original KERPLE's
configuration, at lengths 512 and 2,048 with the same number of tokens: all scores in memory, bias
and weight evaluated for every pair in every layer, activation recomputation in every layer
(checkpoint-activations), and the loss of materialized logits. The rows in between remove these one
by one. The limit is 1 / 1.5 times the first row's time. The exit status is 1 if a limit is
exceeded.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.materialized import MATERIALIZED, materialized_loss, use_original_attention
from benchmarks.support.models import (
    PlainConfig,
    PlainDecoder,
    initialized_gpt,
    random_batch,
)
from benchmarks.support.timing import CpuBench, option_parser
from kerple.attention import dispatch
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.optimizer import parameter_groups
from megatron.utils.command_line import run_main

LAYERS, HIDDEN, HEADS = 4, 256, 4
LENGTH, BATCH, VOCABULARY = 512, 4, 8192
# Method -> the largest accepted ratio to the plain decoder.
LIMITS = {
    "none": 1.10,
    "sinusoidal": 1.10,
    "rotary": 1.10,
    "alibi": 1.25,
    "rpe": 1.25,
    "kerple_log": 1.25,
    "kerple_power_ap_": 1.25,
}
PLAIN = "plain PyTorch"
AS_ORIGINAL, THIS_PROJECT = "as in the original", "this project"
ORIGINAL_METHODS = ("kerple_log", "kerple_bias_wht")
ORIGINAL_LIMIT = 1 / 1.5
Loss = Callable[[Tensor, Tensor], Tensor]


def bench_model(
    pos_emb: str, layers: int = LAYERS, backend: str = "auto", checkpoint_every: int = 0
) -> GPT:
    sizes = layers, HIDDEN, HEADS, LENGTH
    config: Any = PlainConfig(*sizes, pos_emb=pos_emb, attention_backend=backend)
    settings = ModelSettings(config, VOCABULARY)
    return initialized_gpt(settings, checkpoint_every=checkpoint_every)


def training_step(
    loss: Loss, groups: list[dict[str, Any]], tokens: Tensor, labels: Tensor
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step() -> None:
        loss(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure_methods(bench: CpuBench) -> None:
    """Compare all methods with the plain decoder."""
    tokens, labels = random_batch(BATCH, LENGTH, VOCABULARY)
    plain = PlainDecoder(VOCABULARY, LAYERS, HIDDEN, HEADS)
    group = {"params": list(plain.parameters())}
    steps = {PLAIN: training_step(plain.loss, [group], tokens, labels)}
    for name in LIMITS:
        model = bench_model(name)
        groups = parameter_groups(model, 0.0)
        steps[name] = training_step(model.loss, groups, tokens, labels)
    title = (
        f"training step, {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, sequence {LENGTH}, batch "
        f"{BATCH}, vocabulary {VOCABULARY}, {torch.get_num_threads()} threads"
    )
    bench.measure(title, steps, limits=LIMITS)


def measure_original(bench: CpuBench, pos_emb: str, length: int) -> None:
    """Compare the steps from the original's computation to ours."""
    rows = BATCH * LENGTH // length
    tokens, labels = random_batch(rows, length, VOCABULARY)

    # Each model has one step more towards this project's.
    models = {
        AS_ORIGINAL: use_original_attention(bench_model(pos_emb, checkpoint_every=1)),
        "without recomputation": use_original_attention(bench_model(pos_emb)),
        "with tables over distance": bench_model(pos_emb, backend="materialized"),
        "with chunked attention": bench_model(pos_emb),
        THIS_PROJECT: bench_model(pos_emb),
    }
    steps = {}
    losses = []
    for name, model in models.items():
        loss: Loss = partial(materialized_loss, model)
        if name == THIS_PROJECT:
            loss = model.loss
        losses.append(loss(tokens, labels).detach())
        groups = parameter_groups(model, 0.0)
        steps[name] = training_step(loss, groups, tokens, labels)

    # All compute the same loss.
    expected = losses[-1].expand(len(losses))
    torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-5, atol=0)
    title = (
        f"training step with {pos_emb}, length {length}, batch size {rows}, other sizes as above"
    )
    bench.measure(title, steps, limits={THIS_PROJECT: ORIGINAL_LIMIT})


def main() -> int:
    bench = CpuBench(option_parser(__doc__).parse_args())
    measure_methods(bench)
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED
    for length in (LENGTH, 4 * LENGTH):
        for pos_emb in ORIGINAL_METHODS:
            measure_original(bench, pos_emb, length)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
