"""Decoders of this project on the length tests (`LENGTH_TASKS`)."""

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.chomsky.experiment import TEST_SEED, Experiment, Result
from megatron.chomsky.length_tasks import IGNORED, LENGTH_TASKS
from megatron.chomsky.tasks import IntArray
from megatron.config.schema.model import ModelConfig
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

TEST_TOKENS = 8192  # computed at once


class DecoderExperiment(Experiment):
    """A causal GPT on a length test. The loss and the accuracy cover the scored positions."""

    warmup_steps = 50

    def build(self) -> nn.Module:
        settings = self.settings
        self.task = LENGTH_TASKS[self.name]
        self.shortest = self.task.shortest
        config = ModelConfig(
            num_layers=settings.num_layers,
            hidden_size=settings.hidden_size,
            num_attention_heads=settings.num_heads,
            seq_length=settings.test_longest,
            pos_emb=self.pos_emb,
            no_weight_tying=True,
        )
        return GPT(ModelSettings(config, self.task.symbols))

    def loss(self, generator: np.random.Generator, length: int) -> Tensor:
        batch = self.task.sample(generator, self.settings.batch, length)
        targets = torch.from_numpy(batch.targets).to(self.device)
        scored = targets != IGNORED
        return F.cross_entropy(self._logits(batch.tokens, scored), targets[scored])

    def test(self, report: Callable[[int, int], None]) -> Result:
        self.distances: dict[str, dict[str, list[int]]] = {}
        return {**super().test(report), "distances": self.distances}

    def accuracy(self, length: int) -> float:
        bins = self.distances[str(length)] = self.correct_by_distance(length)
        correct, scored = map(sum, zip(*bins.values(), strict=True))
        return correct / scored

    @torch.no_grad()
    def correct_by_distance(self, length: int) -> dict[str, list[int]]:
        """`[correct targets, targets]` of the test samples by bin of the distance; see `Result`."""
        self.model.eval()
        generator = np.random.default_rng([*self.random_seed(length), TEST_SEED])
        batch = self.task.sample(generator, self.settings.test_samples, length)
        scored = batch.targets != IGNORED  # [b, n]

        # The predictions at the scored positions, for as many rows at once as TEST_TOKENS allows.
        predictions = []
        size = max(1, TEST_TOKENS // length)
        for first in range(0, len(scored), size):
            rows = slice(first, first + size)
            mask = torch.from_numpy(scored[rows]).to(self.device)
            logits = self._logits(batch.tokens[rows], mask)  # [scored, symbols]
            predictions.append(logits.argmax(dim=-1).cpu().numpy())
        correct = np.concatenate(predictions) == batch.targets[scored]

        # Bins are from a power of 2 to the next.
        bins = np.log2(batch.distances[scored]).astype(np.int64)
        counts = {}
        for power in np.unique(bins):
            in_bin = correct[bins == power]
            counts[str(1 << int(power))] = [int(in_bin.sum()), len(in_bin)]
        return counts

    def _logits(self, tokens: IntArray, scored: Tensor) -> Tensor:
        """Tokens `[b, n]`, scored bool `[b, n]` -> logits there, float32 `[scored, symbols]`."""
        model = cast(GPT, self.model)
        hidden = model.hidden(torch.from_numpy(tokens).to(self.device))
        return model.logits(hidden[scored]).float()
