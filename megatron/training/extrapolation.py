"""Curves of extrapolation during training: the validation text at several lengths, with the weights as they are."""

import math
import time
from typing import Any

import torch

from megatron.config import Config, UserError
from megatron.data.streams import evaluation_tokens
from megatron.evaluation import evaluate_extrapolation
from megatron.training.distributed import Layout
from megatron.training.logging import Reporter
from megatron.utils.progress import readable_time


class ExtrapolationCurves:
    """Measures `extrapolation-lengths` on the same tokens each time, the same ones at every length.

    The replicas share the text. Nothing random is drawn, and the weights are only read: a run's losses are the same
    without it. A length that the positional method does not know has no curve. Raises UserError, before anything is
    built, for a text that is too short.
    """

    def __init__(self, config: Config, layout: Layout, report: Reporter):
        training = config.training
        self.lengths = tuple(dict.fromkeys(training.extrapolation_lengths))
        self.measured_at: int | None = None
        unit = math.lcm(*self.lengths)
        tokens = evaluation_tokens(config, "valid", training.extrapolation_budget + 1)
        units = (len(tokens) - 1) // unit
        if units < 1:
            raise UserError(
                f"extrapolation-lengths {', '.join(map(str, self.lengths))}: the validation text has {len(tokens):,} "
                f"tokens, and one more than {unit:,} are needed; choose shorter lengths, or give it more of split"
            )
        self.tokens = units * unit
        # Rounded up, so that where replicas have nothing to do, the first, which prints, is not one of them.
        first, last = (-(-rank * units // layout.data_size) for rank in (layout.data_rank, layout.data_rank + 1))
        self._share = tokens[first * unit : last * unit + 1]
        report(
            f"extrapolation: {self.tokens:,} validation tokens at each of {len(self.lengths)} lengths, every "
            f"{training.eval_interval:,} iterations"
        )

    def measure(self, run: Any) -> None:
        """Print and track the mean loss (in nats) at each length. `run` is `megatron.training.loop.Run`; every rank
        calls it together.
        """
        engine, iteration = run.engine, run.state.iteration
        started = time.perf_counter()
        scored = len(self._share) - 1
        totals = torch.zeros(len(self.lengths), dtype=torch.float64, device=engine.layout.device)
        if scored:
            rows = evaluate_extrapolation(
                engine.model,
                self._share,
                self.lengths,
                vocab_size=engine.settings.padded_vocab_size,
                progress=False,
            )
            for place, row in enumerate(rows):
                if row["note"] and self.measured_at is None:
                    run.report(f"extrapolation at length {row['length']:,}: n/a: {row['note']}")
                totals[place] = math.nan if row["loss"] is None else row["loss"] * scored
        means = engine.mean_over_replicas(totals) * engine.layout.data_size / self.tokens
        self.measured_at = iteration
        values, texts = {}, []
        for length, loss in zip(self.lengths, means.tolist(), strict=True):
            if not math.isfinite(loss):
                texts.append(f"{length:,}: n/a")
                continue
            perplexity = math.exp(min(loss, 700.0))
            texts.append(f"{length:,}: {perplexity:.3f}")
            values |= {f"extrapolation/loss/{length}": loss, f"extrapolation/perplexity/{length}": perplexity}
        run.report(
            f"extrapolation at iteration {iteration:,} | perplexity at {' | '.join(texts)} | "
            f"{readable_time(time.perf_counter() - started)}"
        )
        run.trackers.scalars(values, iteration)
