"""`build_tokenizer` for `tokenizer-type` of GPT-NeoX, bytes as tokens, and vocabulary padding."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError

if TYPE_CHECKING:  # building a tokenizer needs no configuration
    from megatron.config import Config

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


class CharLevelTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255. As in GPT-NeoX, the vocabulary has 512 ids and id 0 ends a
    document.

    Id 0 is also the byte NUL, so a text with NUL characters is rejected: they would end documents.
    """

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    fingerprint = hashlib.sha256(b"utf-8 bytes, 512 ids, end of document 0").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        self._check(text)
        return list(text.encode("utf-8"))

    def problem(self, text: str) -> str | None:
        index = text.find("\0")
        if index < 0:
            return None
        return f"character {index} is {text[index]!r}, which ends a document with {self.name}"

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
    # A library is imported only for its own type.
    if tokenizer_type in _UNSUPPORTED_TYPES:
        raise UserError(
            f"tokenizer-type {tokenizer_type} is not supported: "
            f"{_UNSUPPORTED_TYPES[tokenizer_type]}"
        )
    if tokenizer_type == "HFTokenizer":
        from megatron.tokenizer.hugging_face import HuggingFaceTokenizer

        content = "a tokenizer.json"
        return HuggingFaceTokenizer(
            _required_file(vocab_file, tokenizer_type, "vocab-file", content)
        )
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.hugging_face import GPT2BPETokenizer

        vocabulary, merges = "GPT-2's encoder.json (vocab.json)", "GPT-2's vocab.bpe (merges.txt)"
        return GPT2BPETokenizer(
            _required_file(vocab_file, tokenizer_type, "vocab-file", vocabulary),
            _required_file(merge_file, tokenizer_type, "merge-file", merges),
        )
    if tokenizer_type == "SPMTokenizer":
        from megatron.tokenizer.sentencepiece import SPMTokenizer

        content = "a SentencePiece model"
        return SPMTokenizer(_required_file(vocab_file, tokenizer_type, "vocab-file", content))
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
        """The tokenizer of a configuration. The arguments replace its files."""
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
