"""Choosing the next token from logits: greedy, temperature, top-k, top-p.

Legend: b batch, v vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.utils.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    temperature: divides the logits; 0 takes the most probable token.
    top_k: draw among the k most probable tokens; 0: among all.
    top_p: then among the fewest tokens that together hold at least this probability (nucleus sampling, Holtzman et al.
        2020); 0 and 1: among all.
    vocab_size: ids from it on, the padding of the vocabulary, are never drawn; None: the logits have no padding.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p must lie between 0 (off) and 1, not {self.top_p}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, not {self.vocab_size}")

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[b, v]` -> float64 probabilities `[b, k]` of the tokens left, and their ids; not at temperature 0."""
        logits = self._real(logits).double()
        nucleus = 0 < self.top_p < 1
        # Sorting a large vocabulary costs more than the rest, so it is done only where it is needed.
        if 0 < self.top_k < logits.shape[1]:
            logits, ids = logits.topk(self.top_k)
        elif nucleus:
            logits, ids = logits.sort(descending=True)
        else:
            ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
        # The largest logit is subtracted first, so that no temperature however small overflows.
        chances = ((logits - logits.amax(dim=-1, keepdim=True)) / self.temperature).softmax(dim=-1)
        if nucleus:
            before = chances.cumsum(dim=-1) - chances
            chances = chances.masked_fill(before >= self.top_p, 0.0)
            chances = chances / chances.sum(dim=-1, keepdim=True)
        return chances, ids

    def choose(self, logits: Tensor, generators: Sequence[np.random.Generator]) -> list[int]:
        """One token id per row of logits `[b, v]`, each row drawing from its own generator, once.

        Raises UserError when a logit is not a number.
        """
        if torch.isnan(logits).any():
            raise UserError(
                "the model's logits are not numbers (NaN): the checkpoint is damaged or beyond its precision"
            )
        if self.temperature == 0:
            return self._real(logits).argmax(dim=-1).tolist()
        chances, ids = self.probabilities(logits)
        draws = torch.tensor(
            [generator.random() for generator in generators], dtype=torch.float64, device=logits.device
        )
        # Inverse of the cumulative distribution; the last possible token takes what rounding leaves below 1.
        chosen = (chances.cumsum(dim=-1) <= draws[:, None]).sum(dim=-1)
        last = torch.where(chances > 0, torch.arange(chances.shape[1], device=chances.device), 0).amax(dim=-1)
        return ids.gather(1, torch.minimum(chosen, last)[:, None])[:, 0].tolist()

    def _real(self, logits: Tensor) -> Tensor:
        return logits if self.vocab_size is None else logits[:, : self.vocab_size]
