"""Evaluation during training: validation loss, test loss, and extrapolation curves."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megatron.checkpoint.state_dict import TrainingState
from megatron.config import Config
from megatron.data.datasets import Samples
from megatron.evaluation.protocols import NonOverlapping, Segments
from megatron.evaluation.text import evaluation_text
from megatron.model.settings import Layout
from megatron.training.engine import Engine
from megatron.training.logging import Logger
from megatron.utils.progress import readable_time


def perplexity(loss: float) -> float:
    """exp(loss), limited to what a float can represent."""
    return math.exp(min(loss, 700.0))


class Validator:
    """Measures the loss of validation and test samples at the training length, or at
    `seq-length-val`.
    """

    def __init__(
        self,
        engine: Engine,
        logger: Logger,
        valid_dataset: Samples | None,
        test_dataset: Samples | None,
    ):
        self._engine, self._logger = engine, logger
        self._valid_dataset, self._test_dataset = valid_dataset, test_dataset
        self.validated_at: int | None = None  # iteration

    def validate(self, state: TrainingState) -> None:
        """Log the mean loss of the next `eval-iters` global batches of the validation samples."""
        if self._valid_dataset is not None:
            self._measure("validation", self._valid_dataset, state, state.consumed_valid_samples)
            state.consumed_valid_samples += (
                self._engine.config.training.eval_iters * self._engine.global_batch
            )
            self.validated_at = state.iteration

    def test(self, state: TrainingState) -> None:
        """Log the mean loss of the first `eval-iters` global batches of the test samples."""
        if self._test_dataset is not None:
            self._measure("test", self._test_dataset, state, 0)

    def _measure(
        self, name: str, dataset: Samples, state: TrainingState, consumed_samples: int
    ) -> None:
        # A loader of its own, which begins at the given sample.
        engine, started_at = self._engine, time.perf_counter()
        batches = engine.batches(dataset, consumed_samples)
        loss = engine.validate(batches, engine.config.training.eval_iters * engine.accumulation)
        length = engine.config.training.seq_length_val or engine.seq_length
        self._logger.info(
            f"{name} at iteration {state.iteration:,} | length {length:,} | lm loss {loss:.4f} | "
            f"perplexity {perplexity(loss):.3f} | {readable_time(time.perf_counter() - started_at)}"
        )
        self._logger.metrics(
            {f"{name}/loss": loss, f"{name}/perplexity": perplexity(loss)}, state.iteration
        )


def in_context_score(losses: Sequence[float]) -> float | None:
    """The mean loss of the last quarter of the positions minus that of positions 8 to 31, in nats:
    the lower, the more a model uses its context. losses: by position. None for fewer than 64
    positions.
    """
    if len(losses) < 64:
        return None
    return statistics.fmean(losses[len(losses) * 3 // 4 :]) - statistics.fmean(losses[8:32])


@dataclass(frozen=True)
class Share(NonOverlapping):
    """A replica's share of the pieces of text that all lengths divide."""

    rank: int = 0
    ranks: int = 1

    def plan(
        self, available: int, lengths: Sequence[int], token_budget: int | None
    ) -> list[Segments]:
        # Pieces that all lengths divide, so that a share is the same text at every length.
        (pieces,) = super().plan(available, [math.lcm(*lengths)], token_budget)
        share = pieces.shard(self.rank, self.ranks)
        return [share.cut(length) for length in lengths]


class ExtrapolationCurves:
    """Measures the validation loss and the in-context score at each of `extrapolation-lengths`, on
    the same tokens at every length and time.

    The replicas share the text. It uses no random numbers and changes no weights, so it does not
    affect training. A length that the positional method does not support has no curve.
    """

    def __init__(self, config: Config, layout: Layout, logger: Logger):
        """Raises UserError if the validation text is too short."""
        training = config.training
        self._logger, self._budget = logger, training.extrapolation_budget
        self.lengths = tuple(dict.fromkeys(training.extrapolation_lengths or ()))
        self.measured_at: int | None = None  # iteration

        # All lengths divide a piece of text of `common` tokens, so all score the same tokens.
        common = math.lcm(*self.lengths)
        self._text = evaluation_text(config)
        if len(self._text.tokens) < common + 1:
            raise self._text.error(
                f"extrapolation-lengths {', '.join(map(str, self.lengths))} need {common + 1:,} "
                "tokens; use shorter lengths, or enlarge the validation part of split"
            )
        # All replicas count all pieces, whichever they measure.
        (pieces,) = self._text.plan(NonOverlapping(), [common], self._budget)
        self.num_tokens = pieces.targets
        # The pieces are dealt to the replicas; with few pieces, some get none.
        self._share = Share(rank=layout.data_rank, ranks=layout.data_size)
        self._has_share = layout.data_rank < len(pieces.starts)
        logger.info(
            f"extrapolation: measured every {training.eval_interval:,} iterations, on the same "
            f"{self.num_tokens:,} tokens at every length; the validation loss is of other samples "
            "of the validation text, so it differs"
        )

    def measure(self, engine: Engine, iteration: int) -> None:
        """Log the mean loss (in nats), the perplexity and the in-context score at each length. A
        collective.
        """
        # Most runs do not measure extrapolation.
        from megatron.evaluation.records import PositionsRecord, Record
        from megatron.evaluation.runner import evaluate_extrapolation

        # This replica's share of the text, at all lengths.
        started_at = time.perf_counter()
        # Sums of losses and of in-context scores, weighted by the tokens of this replica.
        totals = torch.zeros(2, len(self.lengths), dtype=torch.float64, device=engine.layout.device)
        if self._has_share:
            measured: list[Record] = []
            records = evaluate_extrapolation(
                engine.model,
                self._text,
                self.lengths,
                protocols=[self._share],
                token_budget=self._budget,
                position_bins=max(self.lengths),
                vocab_size=engine.settings.padded_vocab_size,
                progress=False,
                on_record=measured.append,
            )
            positions: list[PositionsRecord] = []
            for measurement in measured:
                if measurement["kind"] == "positions":
                    positions.append(cast(PositionsRecord, measurement))

            # A loss that could not be measured makes the mean over the replicas NaN.
            for index, (record, by_position) in enumerate(zip(records, positions, strict=True)):
                if record["note"] and self.measured_at is None:
                    self._logger.info(
                        f"extrapolation at length {record['length']:,}: n/a: {record['note']}"
                    )
                score = in_context_score(by_position["losses"])
                for row, value in enumerate((record["loss"], score)):
                    totals[row, index] = math.nan
                    if value is not None:
                        totals[row, index] = value * record["tokens"]

        # Mean over all tokens.
        means = engine.mean_over_replicas(totals) * engine.layout.data_size / self.num_tokens
        self.measured_at = iteration
        values, texts = {}, []
        for length, loss, score in zip(self.lengths, *means.tolist(), strict=True):
            if math.isfinite(score):
                values[f"extrapolation/in_context_score/{length}"] = score
            if not math.isfinite(loss):
                texts.append(f"{length:,}: n/a")
                continue
            texts.append(f"{length:,}: {perplexity(loss):.3f}")
            values[f"extrapolation/loss/{length}"] = loss
            values[f"extrapolation/perplexity/{length}"] = perplexity(loss)

        # One line in the log.
        self._logger.info(
            f"extrapolation at iteration {iteration:,} | perplexity at {' | '.join(texts)} | "
            f"{readable_time(time.perf_counter() - started_at)}"
        )
        self._logger.metrics(values, iteration)
