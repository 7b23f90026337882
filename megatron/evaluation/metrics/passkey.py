"""Passkey retrieval: can a model repeat a number that is hidden somewhere in a long text?

The prompt consists of an introduction, filler sentences chosen by the seed, among them at the given
depth a sentence with the pass key, and a question. Prompt and answer have exactly `length + 1`
tokens, so the model reads `length` tokens as for any other measure. The answer is correct if greedy
decoding gives the complete number, i.e. if each of its tokens is the most probable one given the
tokens before it.

After Mohtashami and Jaggi (arXiv 2305.16300), with different sentences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kerple.positional import PositionsExceeded
from megatron.evaluation.modes import parse_modes
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import PasskeyRecord, Provenance, Record
from megatron.evaluation.runner import EvalContext, EvalTask
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError

PROTOCOL = "passkey"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 10
MAX_TOKENS = 1 << 27  # of the prompts of one length and depth

# Part of the measure: other sentences give other numbers.
INTRODUCTION = "There is a pass key somewhere in this text. Find it and keep it in mind."
KEY = " The pass key is {key}. Keep {key} in mind: {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
ANSWER = " {key}"
FILLER = (
    " The path follows the river as far as the mill.",
    " In the morning there is fog over the fields.",
    " A boat lies on the bank, and nobody is near it.",
    " The wind comes from the west and smells of rain.",
    " Behind the hill the road turns to the left.",
    " The bell rings, and the children run out of the school.",
    " Bread is baked here every day but Sunday.",
    " At night the lamp in the harbour can be seen from afar.",
)


@dataclass(frozen=True)
class Prompts:
    """The prompts for a tokenizer. The same seed gives the same prompts."""

    tokenizer: Tokenizer
    seed: int = 0

    @cached_property
    def _pieces(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Token ids of the introduction, the question and the filler sentences."""
        tokenize = self.tokenizer.tokenize_continuation
        introduction = self.tokenizer.tokenize(INTRODUCTION)
        return introduction, tokenize(QUESTION), [tokenize(sentence) for sentence in FILLER]

    @property
    def token_ids(self) -> Tensor:
        """The ids of all parts except the pass keys, int64 `[n]`."""
        introduction, question, filler = self._pieces
        return torch.tensor(sum(filler, introduction + question))

    def keys(self, length: int, depth: float, trials: int) -> list[tuple[list[int], list[int]]]:
        """Token ids of (sentence with the pass key, answer) for each trial."""
        numbers = self._generator(length, depth).integers(10_000, 100_000, trials)
        tokenize = self.tokenizer.tokenize_continuation
        keys = []
        for number in numbers:
            sentence, answer = KEY.format(key=number), ANSWER.format(key=number)
            keys.append((tokenize(sentence), tokenize(answer)))
        return keys

    def determined_by(self, length: int, depth: float, trials: int) -> object:
        """Everything that determines the prompts, for the record's digest."""
        return PROTOCOL, self._pieces, self.keys(length, depth, trials), self.seed, length, depth

    def check(self, length: int, depth: float, trials: int) -> None:
        """Raises UserError if the length is too short for introduction, pass key and question."""
        introduction, question, _ = self._pieces
        keys = self.keys(length, depth, trials)
        longest = max(len(sentence) + len(answer) for sentence, answer in keys)
        minimum = len(introduction) + len(question) + longest - 1
        if length < minimum:
            raise UserError(
                f"--passkey: {length:,} tokens are too few for the pass key and the question, "
                f"which take {minimum:,} with this tokenizer; choose --lengths of at least "
                f"{minimum:,}"
            )

    def build(self, length: int, depth: float, trials: int) -> tuple[Tensor, list[int]]:
        """(prompts followed by their answers, int64 `[trials, length + 1]`; number of answer tokens
        of each). The length must pass `check`.
        """
        introduction, question, filler = self._pieces
        generator = self._generator(length, depth)
        sizes = np.array(list(map(len, filler)))
        rows, answer_lengths = [], []
        for sentence, answer in self.keys(length, depth, trials):
            # Enough random sentences even if all are the shortest; those beyond the room are
            # dropped.
            room = length + 1 - len(introduction) - len(question) - len(sentence) - len(answer)
            choices = generator.integers(len(filler), size=room // sizes.min() + 1)
            ends = np.cumsum(sizes[choices])
            choices = choices[: np.searchsorted(ends, room) + 1]
            text = [token for index in choices for token in filler[index]]

            # Cut the first sentence, so that the text has exactly this room.
            surplus = len(text) - room
            text = text[surplus:]
            boundaries = {0, *(max(0, int(end) - surplus) for end in ends[: len(choices)])}

            # The key is at the boundary of sentences that is nearest to the depth.
            place = min(sorted(boundaries), key=lambda boundary: abs(boundary - depth * room))
            before, after = introduction + text[:place], text[place:] + question
            rows.append(before + sentence + after + answer)
            answer_lengths.append(len(answer))
        return torch.tensor(rows), answer_lengths

    def _generator(self, length: int, depth: float) -> np.random.Generator:
        return np.random.default_rng([self.seed, length, round(depth * 1e6)])


@dataclass(frozen=True)
class PasskeyTask(EvalTask):
    """The prompts of one length and depth."""

    prompts: Prompts
    depth: float

    def run(
        self, context: EvalContext, share: Segments, advance: Callable[[int], None]
    ) -> list[Record]:
        """If the model has no positions for the length, the record has a note instead of values."""
        # Answers have different lengths, the rows of a batch the same number of positions.
        length = share.length
        trials = len(self.segments.starts)
        rows, answer_lengths = self.prompts.build(length, self.depth, trials)
        numbers = torch.tensor(share.starts, dtype=torch.int64) // (length + 1)
        answers = torch.tensor(answer_lengths)[numbers]
        longest = max(answer_lengths)
        correct = torch.zeros((), dtype=torch.int64)
        note = None
        try:
            hidden: list[Tensor] = []
            for chunk in context.reader.hidden_states(rows.flatten(), share, self.mode.attention):
                advance(chunk.hidden.shape[0] * chunk.hidden.shape[1])
                end = chunk.position + chunk.hidden.shape[1]
                if end > length - longest:
                    hidden.append(chunk.hidden[:, max(0, length - longest - chunk.position) :])
                if end == length:
                    logits = context.reader.decoder.logits(torch.cat(hidden, dim=1))
                    is_top = (logits.argmax(dim=-1) == chunk.text[:, -longest:]).cpu()
                    # Shorter answers begin later; do not count the tokens before them.
                    batch_answers = answers[chunk.segment : chunk.segment + len(is_top), None]
                    before_answer = torch.arange(longest, 0, -1) > batch_answers
                    correct += (is_top | before_answer).all(dim=1).sum()
                    hidden = []
        except PositionsExceeded as error:
            note = str(error)

        # Sums over all ranks.
        note = context.share_note(note)
        context.sum_over_ranks(correct)
        record: PasskeyRecord = {
            **self.planned[0],
            "note": note,
            "depth": self.depth,
            "trials": trials,
            "correct": 0,
            "accuracy": None,
        }
        if note is None:
            record["correct"], record["accuracy"] = int(correct), int(correct) / trials
        return [record]


def plan_passkey(
    prompts: Prompts,
    lengths: Sequence[int],
    modes: Sequence[str],
    depths: Sequence[float],
    trials: int,
    provenance: Provenance,
    corpus: str | None = None,
) -> list[PasskeyTask]:
    """The tasks by mode, length and depth. Raises UserError if a length is too short."""
    # The prompts must fit into memory.
    if trials * (max(lengths) + 1) > MAX_TOKENS:
        raise UserError(
            f"--passkey-trials {trials:,}: the prompts of {max(lengths):,} tokens have more than "
            f"{MAX_TOKENS:,} tokens in total; choose at most {MAX_TOKENS // (max(lengths) + 1):,} "
            "trials"
        )

    # The texts do not depend on the mode.
    determined_by = {}
    for length in lengths:
        for depth in dict.fromkeys(depths):
            prompts.check(length, depth, trials)
            determined_by[length, depth] = prompts.determined_by(length, depth, trials)

    # The records have all values but the results.
    tasks = []
    for mode in parse_modes(modes, provenance.train_length):
        for (length, depth), origin in determined_by.items():
            planned: PasskeyRecord = {
                **provenance.record(
                    "passkey",
                    corpus=corpus,
                    bos=prompts.tokenizer.bos,
                    mode=mode.name,
                    protocol=PROTOCOL,
                    length=length,
                    determined_by=origin,
                ),
                "depth": depth,
                "trials": trials,
                "correct": 0,
                "accuracy": None,
            }
            segments = Segments(length, range(0, trials * (length + 1), length + 1))
            tasks.append(PasskeyTask(mode, segments, (planned,), prompts, depth))
    return tasks
