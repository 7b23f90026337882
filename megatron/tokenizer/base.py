"""What every tokenizer offers, and the size of the embedding table that goes with it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from megatron.utils.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: the GPT-NeoX `tokenizer-type`, e.g. "HFTokenizer".
        vocab_size: one more than the largest id the tokenizer can give, special tokens included; not padded.
        eod: id of the end-of-document token.
        fingerprint: sha256 (hexadecimal) of whatever decides the ids; equal for tokenizers that give equal ids.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, without an end-of-document token."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`; byte-level tokenizers give back `tokenize`'s text exactly.

        Bytes that are not UTF-8 (ids cut in the middle of a character, say) become U+FFFD.
        """

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of every text; tokenizers that have a faster way for many texts use it."""
        return [self.tokenize(text) for text in texts]

    def byte_lengths(self) -> np.ndarray | None:
        """Bytes of text that each id stands for, int64 [vocab_size], 0 for the end of a document and for ids without a
        token: what bits per byte needs. None where a token's bytes depend on its neighbours.
        """
        return None


def padded_vocab_size(vocab_size: int, divisor: int = 128, model_parallel_size: int = 1) -> int:
    """`vocab_size` rounded up to a multiple of `divisor * model_parallel_size`, as Megatron pads its embedding table.

    The multiple makes every tensor-parallel rank's share equal and a good size for matrix multiplication. GPT-2's
    50,257 becomes 50,304 at the defaults.
    """
    for name, value in (
        ("vocabulary size", vocab_size),
        ("make-vocab-size-divisible-by", divisor),
        ("model-parallel-size", model_parallel_size),
    ):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    multiple = divisor * model_parallel_size
    return -(-vocab_size // multiple) * multiple
