"""The tokenizer interface, and tokenizer_config.json: the part of a Hugging Face tokenizer that its
vocabulary file does not contain.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.utils.errors import UserError
from megatron.utils.files import read_file

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_CONFIG = "tokenizer_config.json"


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Attributes:
        name: the GPT-NeoX `tokenizer-type`, e.g. "HFTokenizer".
        vocab_size: largest token id plus one, including special tokens, without padding.
        eod: id of the end-of-document token.
        bos: id of the token that the tokenizer puts before every text; None if it adds none.
        fingerprint: SHA-256 (hexadecimal) of the vocabulary; equal fingerprints mean equal ids for
            any text.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    bos: int | None = None

    @property
    def definition(self) -> str:
        """What decides about ids: equal for two files that differ in nothing else."""
        return self.fingerprint

    @property
    def first(self) -> int:
        """The token before a text: `bos`, or else `eod`, which ends the previous document."""
        if self.bos is None:
            return self.eod
        return self.bos

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`, after `bos` if the tokenizer has one, and without an
        end-of-document token. Raises UserError if the text has a `problem`.
        """

    def problem(self, text: str) -> str | None:
        """Why `tokenize` raises UserError for the text, with the character that it cannot
        represent; None if it does not.
        """
        return None

    def _check(self, text: str) -> None:
        """Raises UserError if the text has a problem."""
        problem = self.problem(text)
        if problem is not None:
            raise UserError(
                f"a text cannot be tokenized: its {problem}; remove such characters, or use "
                "another tokenizer"
            )

    def tokenize_continuation(self, text: str) -> list[int]:
        """The ids that `text`, which starts with white space, adds to the end of another text."""
        return self.tokenize("." + text)[len(self.tokenize(".")) :]

    @property
    def special_ids(self) -> list[int]:
        """The ids that `tokenize` gives for special tokens in a text, such as `eod`."""
        return [self.eod]

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of the tokens that stand for no text, by id, as far as the files have them."""
        return {}

    @property
    def unknown_id(self) -> int | None:
        """The id that `tokenize` gives for text that no token represents; None if there is none."""
        return None

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Byte-level tokenizers restore the input of `tokenize` exactly.

        Invalid UTF-8, for example ids that end in the middle of a character, is decoded as U+FFFD.
        """

    def detokenize_continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to the text of `prompt`. Alone, the first word of
        SentencePiece's ids would lose the space before it.
        """
        # A continuation can change the end of the prompt, such as half a character.
        before, text = self.detokenize(prompt), self.detokenize([*prompt, *ids])
        return text[len(before) :] if text.startswith(before) else self.detokenize(ids)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize every text. Subclasses override this if the library has a faster batch call."""
        return [self.tokenize(text) for text in texts]

    def pieces(self, text: str) -> Iterator[str]:
        """Split a long text so that the ids of its pieces are those of the text. Encoding them
        needs less memory.
        """
        yield text

    def byte_lengths(self) -> np.ndarray | None:
        """Return the UTF-8 bytes of each id, int64 [vocab_size], or None if they depend on
        neighbouring tokens.

        The end-of-document token and unused ids count as 0. Bits per byte is computed from this
        table.
        """
        return None


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        bos, eos, pad: text of the token at the beginning and end of a sequence, and of padding;
            None if the file names none.
        adds_bos: whether `bos` is put before every text (add_bos_token).
        largest_id: of the tokens added to the vocabulary; -1 if there are none.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    adds_bos: bool = False
    largest_id: int = -1

    @classmethod
    def next_to(cls, path: Path) -> "SpecialTokens":
        """Read the tokenizer_config.json in the folder of a vocabulary file; no special tokens
        without one. Raises UserError if it is not JSON of the expected form.
        """
        # Only the keys that matter here are read.
        file = path.parent / TOKENIZER_CONFIG
        if not os.path.isfile(file):
            return cls()
        try:
            values = json.loads(read_file(file))
            added = [int(number) for number in values.get("added_tokens_decoder") or {}]
            names = ("bos_token", "eos_token", "pad_token")
            bos, eos, pad = (_text(values.get(name)) for name in names)
            adds_bos = bool(values.get("add_bos_token"))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{file} is not a {TOKENIZER_CONFIG} of transformers: {error}"
            ) from error
        return cls(bos, eos, pad, adds_bos, max(added, default=-1))


def _text(token: Any) -> str | None:
    """The text of a token, which is stored as such or as a dictionary with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
