"""Passkey retrieval: does a model give back a number that stands somewhere in a long text of no interest?

The prompt: a line that says that there is a pass key; sentences that say nothing, drawn by the seed; among them, at the
wanted depth between two of them, the sentence with the key; the question. Prompt and answer are exactly one token more
than the length: the model reads the same number of tokens as in every other measure. It is right where greedy decoding
gives the whole number: where, the answer being given, the most probable token is the right one at each of its places.

After Mohtashami and Jaggi (arXiv 2305.16300); the words are others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kerple.positional import PositionsExceeded
from megatron.evaluation.modes import parse_mode
from megatron.evaluation.protocols import Segments
from megatron.evaluation.records import PasskeyRecord, Provenance, Record
from megatron.evaluation.scoring import read
from megatron.evaluation.work import Run, Work
from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError

PROTOCOL = "passkey"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TRIALS = 10

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
    """The prompts of a tokenizer, the same from the same seed."""

    tokenizer: Tokenizer
    seed: int = 0

    @cached_property
    def _pieces(self) -> tuple[list[int], list[int], list[list[int]]]:
        """Ids of introduction, question and filler."""
        ids = self.tokenizer.tokenize
        return ids(INTRODUCTION), ids(QUESTION), [ids(sentence) for sentence in FILLER]

    @property
    def vocabulary(self) -> Tensor:
        """The ids of everything that never changes, int64 `[n]`."""
        introduction, question, filler = self._pieces
        return torch.tensor([*introduction, *question, *(token for sentence in filler for token in sentence)])

    def keys(self, length: int, depth: float, trials: int) -> list[tuple[list[int], list[int]]]:
        """(the sentence with the key, the answer) of each trial, as ids."""
        numbers = self._random(length, depth).integers(10_000, 100_000, trials)
        ids = self.tokenizer.tokenize
        return [(ids(KEY.format(key=number)), ids(ANSWER.format(key=number))) for number in numbers]

    def decided_by(self, length: int, depth: float, trials: int) -> object:
        """What the prompts follow from."""
        return PROTOCOL, self._pieces, self.keys(length, depth, trials), self.seed, length, depth

    def check(self, length: int, depth: float, trials: int) -> None:
        """Raises UserError where the length has no room for the key and the question."""
        introduction, question, _ = self._pieces
        longest = max(len(sentence) + len(answer) for sentence, answer in self.keys(length, depth, trials))
        least = len(introduction) + len(question) + longest - 1
        if length < least:
            raise UserError(
                f"--passkey: {length:,} tokens have no room for the pass key and the question, which take {least:,} of "
                f"this tokenizer's; choose --lengths from {least:,} on"
            )

    def make(self, length: int, depth: float, trials: int) -> tuple[Tensor, list[int]]:
        """(prompts with their answers, int64 `[trials, length + 1]`; how many tokens of each row's end are the answer).

        Raises UserError as `check`.
        """
        self.check(length, depth, trials)
        introduction, question, filler = self._pieces
        random = self._random(length, depth)
        rows, answers = [], []
        for sentence, answer in self.keys(length, depth, trials):
            room = length + 1 - len(introduction) - len(question) - len(sentence) - len(answer)
            text, borders = _filler(filler, room, random)
            place = min(borders, key=lambda border: abs(border - depth * room))
            rows.append([*introduction, *text[:place], *sentence, *text[place:], *question, *answer])
            answers.append(len(answer))
        return torch.tensor(rows), answers

    def _random(self, length: int, depth: float) -> np.random.Generator:
        return np.random.default_rng([self.seed, length, round(depth * 1e6)])


@dataclass(frozen=True)
class PasskeyWork(Work):
    """The prompts of one length and depth."""

    prompts: Prompts
    depth: float

    def records(self, run: Run, share: Segments, advance: Callable[[int], None]) -> list[Record]:
        """A length that the model has no positions for has no values, and a note."""
        length, trials = share.length, len(self.segments.starts)
        rows, answers = self.prompts.make(length, self.depth, trials)
        wanted = torch.tensor(answers)[torch.tensor(share.starts, dtype=torch.int64) // (length + 1)]
        longest, correct, note = max(answers), torch.zeros((), dtype=torch.int64), None
        sizes = {"query_chunk": run.query_chunk, "batch_tokens": run.batch_tokens, "device": run.device}
        try:
            hidden: list[Tensor] = []
            for part in read(run.decoder, rows.flatten(), share, span=self.mode.span, **sizes):
                advance(part.hidden.shape[0] * part.hidden.shape[1])
                end = part.position + part.hidden.shape[1]
                if end > length - longest:
                    hidden.append(part.hidden[:, max(0, length - longest - part.position) :])
                if end == length:
                    logits = run.decoder.logits(torch.cat(hidden, dim=1))
                    right = (logits.argmax(dim=-1) == part.text[:, -longest:]).cpu()
                    # An answer shorter than the longest begins later.
                    before = torch.arange(longest, 0, -1) > wanted[part.segment : part.segment + len(right), None]
                    correct += (right | before).all(dim=1).sum()
                    hidden = []
        except PositionsExceeded as exceeded:
            note = str(exceeded)
        note = run.ranks.first(note)
        run.ranks.add(correct)
        (record,), known = self.wanted, note is None
        return [
            PasskeyRecord(
                **{**record, "note": note},
                trials=trials,
                correct=int(correct) if known else 0,
                accuracy=int(correct) / trials if known else None,
            )
        ]


def plan_passkey(
    prompts: Prompts,
    lengths: Sequence[int],
    modes: Sequence[str],
    depths: Sequence[float],
    trials: int,
    origin: Provenance,
    corpus: str | None = None,
) -> list[PasskeyWork]:
    """Every mode, length and depth, in that order. Raises UserError for a length without room for the prompt."""
    works = []
    decided = {}
    for length in lengths:
        for depth in dict.fromkeys(depths):
            prompts.check(length, depth, trials)
            decided[length, depth] = prompts.decided_by(length, depth, trials)
    for name in dict.fromkeys(modes):
        mode = parse_mode(name, origin.train_length)
        for (length, depth), decided_by in decided.items():
            about = {"corpus": corpus, "mode": mode.name, "protocol": PROTOCOL, "length": length}
            record = {**origin.record("passkey", **about, determined_by=decided_by), "depth": depth}
            segments = Segments(length, range(0, trials * (length + 1), length + 1))
            works.append(PasskeyWork(mode, segments, (record,), prompts, depth))
    return works


def _filler(sentences: Sequence[Sequence[int]], room: int, random: np.random.Generator) -> tuple[list[int], list[int]]:
    """(exactly `room` tokens of sentences, of which the first may lack its beginning; where sentences begin or end)."""
    sizes = np.array([len(sentence) for sentence in sentences])
    drawn = random.integers(len(sentences), size=room // sizes.min() + 1)
    ends = np.cumsum(sizes[drawn])
    drawn = drawn[: np.searchsorted(ends, room) + 1]
    text = [token for index in drawn for token in sentences[index]]
    surplus = len(text) - room
    borders = {0, *(max(0, int(end) - surplus) for end in ends[: len(drawn)])}
    return text[surplus:], sorted(borders)
