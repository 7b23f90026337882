"""The tokenizer interface, `build_tokenizer` for `tokenizer-type` of GPT-NeoX, vocabulary padding,
and tokenizer_config.json: the part of a Hugging Face tokenizer that its vocabulary file does not
contain.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.utils.errors import UserError
from megatron.utils.files import read_file

if TYPE_CHECKING:  # building a tokenizer needs no configuration
    from megatron.config import Config

END_OF_DOCUMENT = "<|endoftext|>"

_PIECE = 1 << 20  # characters

TOKENIZER_TYPES = ("HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer", "CharLevelTokenizer")

# GPT-NeoX's other types: why each is unsupported, and the alternative.
_UNSUPPORTED_TYPES = {
    "TiktokenTokenizer": "tiktoken downloads vocabularies at run time; use a tokenizer.json with "
    "HFTokenizer",
    "HFLlamaTokenizer": "use the model's tokenizer.json with HFTokenizer, or its tokenizer.model "
    "with SPMTokenizer",
    "HFGPT2Tokenizer": "use the tokenizer.json of gpt2 with HFTokenizer",
}


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Attributes:
        name: the GPT-NeoX `tokenizer-type`, e.g. "HFTokenizer".
        vocab_size: largest token id plus one, including special tokens, without padding.
        eod: id of the end-of-document token.
        bos: id of the token that the tokenizer puts before every text; None if it adds none.
        reserved: a character that a text must not contain, because its id is `eod`; None if there
            is none.
        fingerprint: SHA-256 (hexadecimal) of the vocabulary; equal fingerprints mean equal ids for
            any text.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    bos: int | None = None
    reserved: str | None = None

    @property
    def first(self) -> int:
        """The token that precedes the first one of a text: `bos`, or else `eod`, which ends the
        previous document.
        """
        return self.eod if self.bos is None else self.bos

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of `text`, after `bos` if the tokenizer has one, and without an
        end-of-document token.
        """

    def tokenize_continuation(self, text: str) -> list[int]:
        """Return the token ids that `text`, which starts with white space, adds to the end of
        another text.
        """
        return self.tokenize("." + text)[len(self.tokenize(".")) :]

    @property
    def special_ids(self) -> list[int]:
        """The ids that `tokenize` gives for special tokens, such as `eod`, if a text
        contains them.
        """
        return [self.eod]

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Byte-level tokenizers restore the input of `tokenize` exactly.

        Invalid UTF-8, for example ids that end in the middle of a character, is decoded as U+FFFD.
        """

    def detokenize_continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to the text of `prompt`. Alone, the first word of
        SentencePiece's ids would lose the space before it.
        """
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


class CharLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. As in GPT-NeoX, the vocabulary has 512 ids and id 0 ends a
    document.

    Id 0 is also the byte NUL, so a text with NUL characters is rejected: they would end documents.
    """

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    reserved = "\0"
    fingerprint = hashlib.sha256(b"utf-8 bytes, 512 ids, end of document 0").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        if self.reserved in text:
            raise UserError(
                f"the text contains a NUL character, which ends a document with {self.name}; "
                "remove it, or use another tokenizer"
            )
        return list(text.encode("utf-8"))

    def pieces(self, text: str) -> Iterator[str]:
        for start in range(0, len(text), _PIECE):
            yield text[start : start + _PIECE]

    def detokenize(self, ids: Sequence[int]) -> str:
        # An untrained model may sample ids above 255. The byte 0xFF never occurs in UTF-8, so they
        # decode as U+FFFD.
        return bytes(min(int(token), 255) for token in ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        lengths[:256] = 1
        lengths[self.eod] = 0
        return lengths


def build_tokenizer(
    tokenizer_type: str, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
) -> Tokenizer:
    """Build the tokenizer that GPT-NeoX's `tokenizer-type` names. `TokenizerConfig` describes the
    types and files.

    Raises UserError if the type is unknown or unsupported, a file is missing, unreadable or
    inconsistent, or the vocabulary has no end-of-document token.
    """
    if tokenizer_type in _UNSUPPORTED_TYPES:
        raise UserError(
            f"tokenizer-type {tokenizer_type} is not supported: "
            f"{_UNSUPPORTED_TYPES[tokenizer_type]}"
        )
    if tokenizer_type == "HFTokenizer":
        from megatron.tokenizer.hugging_face import HuggingFaceTokenizer

        return HuggingFaceTokenizer(
            _required_file(vocab_file, tokenizer_type, "vocab-file", "a tokenizer.json")
        )
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.hugging_face import GPT2BPETokenizer

        return GPT2BPETokenizer(
            _required_file(
                vocab_file, tokenizer_type, "vocab-file", "GPT-2's encoder.json (vocab.json)"
            ),
            _required_file(
                merge_file, tokenizer_type, "merge-file", "GPT-2's vocab.bpe (merges.txt)"
            ),
        )
    if tokenizer_type == "SPMTokenizer":
        from megatron.tokenizer.sentencepiece import SPMTokenizer

        return SPMTokenizer(
            _required_file(vocab_file, tokenizer_type, "vocab-file", "a SentencePiece model")
        )
    if tokenizer_type == "CharLevelTokenizer":
        return CharLevelTokenizer()
    raise UserError(
        f"unknown tokenizer-type {tokenizer_type!r}; supported: {', '.join(TOKENIZER_TYPES)}"
    )


@dataclass(frozen=True)
class TokenizerFiles:
    """The arguments of `build_tokenizer`, to build the tokenizer later."""

    tokenizer_type: str
    vocab_file: str | Path | None = None
    merge_file: str | Path | None = None

    @classmethod
    def of(
        cls,
        config: "Config",
        vocab_file: str | Path | None = None,
        merge_file: str | Path | None = None,
    ) -> "TokenizerFiles":
        """The tokenizer of a configuration. The arguments replace the files that the configuration
        names.
        """
        keys = config.tokenizer
        return cls(
            keys.tokenizer_type, vocab_file or keys.vocab_file, merge_file or keys.merge_file
        )

    def build(self) -> Tokenizer:
        """Raises UserError if a file is missing or invalid."""
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


def _required_file(
    path: str | Path | None, tokenizer_type: str, key: str, description: str
) -> Path:
    if path is None or str(path) == "":
        raise UserError(f"tokenizer-type {tokenizer_type} needs {key}: {description}")
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, False for an invalid name
        raise UserError(f"{key} {path} is not a file; {tokenizer_type} needs {description}")
    return path


def padded_vocab_size(vocab_size: int, divisor: int = 128, model_parallel_size: int = 1) -> int:
    """Round `vocab_size` up to a multiple of `divisor * model_parallel_size`, as Megatron pads its
    embedding table.

    This gives every tensor-parallel rank an equal share of a size that suits matrix multiplication.
    With the defaults, GPT-2's 50,257 becomes 50,304.
    """
    multiple = divisor * model_parallel_size
    return -(-vocab_size // multiple) * multiple


TOKENIZER_CONFIG = "tokenizer_config.json"


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
        file = path.parent / TOKENIZER_CONFIG
        if not os.path.isfile(file):
            return cls()
        try:
            values = json.loads(read_file(file))
            added = [int(number) for number in values.get("added_tokens_decoder") or {}]
            bos, eos, pad = (
                _text(values.get(name)) for name in ("bos_token", "eos_token", "pad_token")
            )
            adds_bos = bool(values.get("add_bos_token"))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{file} is not a {TOKENIZER_CONFIG} of transformers: {error}"
            ) from error
        return cls(bos, eos, pad, adds_bos, max(added, default=-1))


def _text(token: Any) -> str | None:
    """The text of a token, which is stored as such or as a dictionary with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
