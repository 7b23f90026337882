"""Text to token ids and back: Hugging Face `tokenizer.json`, GPT-2's byte-level BPE, and bytes."""

from megatron.tokenizer.base import Tokenizer, padded_vocab_size
from megatron.tokenizer.build import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "padded_vocab_size"]
