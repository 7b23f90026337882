"""Training a byte-level BPE tokenizer on a corpus."""

from collections.abc import Iterable

import tokenizers

from megatron.tokenizer.base import END_OF_DOCUMENT
from megatron.utils.errors import UserError

# 256 byte symbols and the end-of-document token.
SMALLEST_VOCABULARY = 257


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> tokenizers.Tokenizer:
    """A byte-level BPE with GPT-2's splitting pattern, no normalization (decoding gives back the text exactly).

    Args:
        texts: the documents; read once, never all held in memory.
        vocab_size: number of ids to reach, `<|endoftext|>` (id 0) and the 256 bytes included. Fewer come out when the
            corpus has no pair left that occurs twice.
        progress: show the library's progress bars on a terminal.

    Returns:
        the library's tokenizer; `.save(path)` writes a tokenizer.json for `tokenizer-type` HFTokenizer. The same texts
        in the same order give the same tokenizer.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocabulary size {vocab_size} is too small: a byte-level BPE has the 256 bytes and {END_OF_DOCUMENT}, "
            f"so at least {SMALLEST_VOCABULARY}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer
