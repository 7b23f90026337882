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

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.materialized import MATERIALIZED, materialized_loss, use_original_attention
from benchmarks.support.models import PlainConfig, PlainDecoder, initialized_gpt
from benchmarks.support.timing import Timing, add_options, apply_options, compare, show, write_json
from kerple.attention import dispatch
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.training.optimizer import parameter_groups
from megatron.utils.command_line import run_main

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 4, 256, 4, 512, 4, 8192
LIMITS = {
    **dict.fromkeys(("none", "sinusoidal", "rotary"), 1.10),
    **dict.fromkeys(("alibi", "rpe", "kerple_log", "kerple_power_ap_"), 1.25),
}
PLAIN = "plain PyTorch"
AS_ORIGINAL, THIS_PROJECT = "as in the original", "this project"
ORIGINAL_METHODS = ("kerple_log", "kerple_bias_wht")
ORIGINAL_LIMIT = 1 / 1.5
Loss = Callable[[Tensor, Tensor], Tensor]


def bench_model(
    pos_emb: str, layers: int = LAYERS, backend: str = "auto", checkpoint_every: int = 0
) -> GPT:
    config: Any = PlainConfig(
        layers, HIDDEN, HEADS, LENGTH, pos_emb=pos_emb, attention_backend=backend
    )
    return initialized_gpt(ModelSettings(config, VOCABULARY), checkpoint_every=checkpoint_every)


def training_step(
    loss: Loss, groups: list[dict[str, Any]], tokens: Tensor, labels: Tensor
) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step() -> None:
        loss(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def batch(size: int = BATCH, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and labels, `[b, s]`."""
    torch.manual_seed(1234)
    text = torch.randint(0, VOCABULARY, (size, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def plain_decoder_table(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """Measure the plain decoder and all methods, print the table, and return it by title."""
    tokens, labels = batch()
    plain = PlainDecoder(VOCABULARY, LAYERS, HIDDEN, HEADS)
    group = {"params": list(plain.parameters())}
    steps = {PLAIN: training_step(plain.loss, [group], tokens, labels)}
    for name in LIMITS:
        model = bench_model(name)
        steps[name] = training_step(model.loss, parameter_groups(model, 0.0), tokens, labels)
    title = (
        f"training step, {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, sequence {LENGTH}, batch "
        f"{BATCH}, vocabulary {VOCABULARY}, {torch.get_num_threads()} threads"
    )
    timings = compare(steps, rounds=rounds, limits=LIMITS, clock=clock)
    show(title, timings)
    return {title: timings}


def original_tables(rounds: int, clock: Callable[[], float]) -> dict[str, list[Timing]]:
    """Measure the steps from the original's computation to ours; print and return the tables."""
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED
    results = {}
    for length in (LENGTH, 4 * LENGTH):
        tokens, labels = batch(BATCH * LENGTH // length, length)
        for pos_emb in ORIGINAL_METHODS:
            # Each model has one step more towards this project's.
            models = {
                AS_ORIGINAL: use_original_attention(bench_model(pos_emb, checkpoint_every=1)),
                "without recomputation": use_original_attention(bench_model(pos_emb)),
                "with tables over distance": bench_model(pos_emb, backend="materialized"),
                "with chunked attention": bench_model(pos_emb),
                THIS_PROJECT: bench_model(pos_emb),
            }
            losses: dict[str, Loss] = {}
            for name, model in models.items():
                losses[name] = partial(materialized_loss, model)
            losses[THIS_PROJECT] = models[THIS_PROJECT].loss

            # All compute the same loss.
            values = torch.stack([loss(tokens, labels).detach() for loss in losses.values()])
            torch.testing.assert_close(values, values[-1:].expand_as(values), rtol=1e-5, atol=0)
            steps = {}
            for name, model in models.items():
                groups = parameter_groups(model, 0.0)
                steps[name] = training_step(losses[name], groups, tokens, labels)
            title = (
                f"training step with {pos_emb}, length {length}, batch size {len(tokens)}, other "
                "sizes as above"
            )
            limits = {THIS_PROJECT: ORIGINAL_LIMIT}
            results[title] = compare(steps, rounds=rounds, limits=limits, clock=clock)
            show(title, results[title])
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add_options(parser)
    options = parser.parse_args()
    clock = apply_options(options)
    tables = plain_decoder_table(options.rounds, clock) | original_tables(options.rounds, clock)
    if options.json:
        write_json(options.json, tables)
    return int(not all(timing.passed for timings in tables.values() for timing in timings))


if __name__ == "__main__":
    sys.exit(run_main(main))
