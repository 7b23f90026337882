"""Small SentencePiece models."""

import io
from pathlib import Path
from typing import Any

import sentencepiece

from tests.support.texts import KINDS

# The options of Llama's model: every text can be encoded and decoded without loss.
LLAMA: dict[str, Any] = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
}


def train_sentencepiece(
    path: Path, model_type: str = "bpe", vocab_size: int = 600, **options: Any
) -> Path:
    """Train a model on this project's test texts and write it to `path`."""
    model = io.BytesIO()
    lines = [line for text in KINDS.values() for line in text.splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type=model_type,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return path
