"""Tokenizers: Hugging Face `tokenizer.json` files, SentencePiece models, GPT-2's byte-level BPE, and UTF-8 bytes."""

from megatron.tokenizer.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_TYPES,
    CharLevelTokenizer,
    Tokenizer,
    TokenizerFiles,
    build_tokenizer,
    padded_vocab_size,
)

__all__ = [
    "END_OF_DOCUMENT",
    "TOKENIZER_TYPES",
    "CharLevelTokenizer",
    "Tokenizer",
    "TokenizerFiles",
    "build_tokenizer",
    "padded_vocab_size",
]
