"""Characters, as UTF-8 bytes."""

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron.tokenizer.base import Tokenizer


class CharLevelTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text; sizes as GPT-NeoX's: 512 ids, end of document 0.

    Id 0 is also the byte NUL: a text that holds NUL characters reads as if documents ended there.
    """

    name = "CharLevelTokenizer"
    vocab_size = 512
    eod = 0
    fingerprint = hashlib.sha256(b"utf-8 bytes, 512 ids, end of document 0").hexdigest()

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        # Ids above 255 stand for nothing (an untrained model may sample one): 0xFF is never part of UTF-8, so they
        # come out as U+FFFD.
        return bytes(min(int(token), 255) for token in ids).decode("utf-8", errors="replace")

    def byte_lengths(self) -> np.ndarray:
        ids = np.arange(self.vocab_size)
        return ((ids != self.eod) & (ids < 256)).astype(np.int64)
