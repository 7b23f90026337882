"""Tokenizers that run on Hugging Face's `tokenizers` library: tokenizer.json files and GPT-2's vocabulary."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from megatron.tokenizer.base import END_OF_DOCUMENT, Tokenizer
from megatron.utils.errors import UserError

# The library keeps about 100 bytes per token of the text in hand. Longer texts are cut where no token can straddle.
_CHARACTERS_AT_ONCE = 1 << 20
_BEFORE_SPACE = re.compile(r"(?<=\S)(?=[ \n])")


class _LibraryTokenizer(Tokenizer):
    """Encoding and decoding by a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eod: int, fingerprint: str, cut_before_spaces: bool):
        self._tokenizer = tokenizer
        self._cut_before_spaces = cut_before_spaces
        self.eod = eod
        self.fingerprint = fingerprint
        # Ids need not be dense: the largest one decides the size of the embedding table.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def tokenize(self, text: str) -> list[int]:
        if len(text) <= _CHARACTERS_AT_ONCE or not self._cut_before_spaces:
            return self._tokenizer.encode(text).ids
        ids: list[int] = []
        for piece in _cut(text, _CHARACTERS_AT_ONCE):
            ids.extend(self._tokenizer.encode(piece).ids)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) > _CHARACTERS_AT_ONCE for text in texts):
            return [self.tokenize(text) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts))]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray | None:
        """Known for byte-level vocabularies, in which each character of a token is one byte."""
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = len(added.content.encode("utf-8"))
        lengths[self.eod] = 0
        return lengths


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer.json, ids as the library's `encode` gives them. Truncation and padding in the file are turned off: a
    corpus must never be cut, nor filled up.

    Raises:
        UserError: not a tokenizer.json, or no `<|endoftext|>` among its tokens.
    """

    name = "HFTokenizer"

    def __init__(self, path: Path):
        content = _read(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json that the tokenizers library reads: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        eod = tokenizer.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
            raise UserError(
                f"{path} has no {END_OF_DOCUMENT} token to end documents with; its special tokens: "
                f"{', '.join(special) if special else 'none'}. Add it with tokenizers' add_special_tokens, or train a "
                "tokenizer with tools/datasets/train_tokenizer.py"
            )
        super().__init__(tokenizer, eod, hashlib.sha256(content).hexdigest(), _spaces_begin_pieces(tokenizer))


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from its two files.

    No text is read as a special token: `<|endoftext|>` written in a document becomes ordinary tokens, so that a
    document cannot forge the end of another.

    Raises:
        UserError: files that are not GPT-2's vocabulary and merges, or that do not belong together.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path):
        vocabulary_bytes, merges_bytes = _read(vocab_file), _read(merge_file)
        vocabulary = _parse_vocabulary(vocabulary_bytes, vocab_file)
        merges = _parse_merges(merges_bytes, merge_file)
        try:
            model = tokenizers.models.BPE(vocab=vocabulary, merges=merges)
        except Exception as error:
            raise UserError(f"merge-file {merge_file} does not belong to vocab-file {vocab_file}: {error}") from error
        if END_OF_DOCUMENT not in vocabulary:
            raise UserError(f"vocab-file {vocab_file} has no {END_OF_DOCUMENT} entry; GPT-2's has it as id 50256")
        missing = [symbol for symbol in tokenizers.pre_tokenizers.ByteLevel.alphabet() if symbol not in vocabulary]
        if missing:
            raise UserError(f"vocab-file {vocab_file} lacks {len(missing)} of the 256 byte symbols: not GPT-2's format")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        fingerprint = hashlib.sha256(vocabulary_bytes + b"\0" + merges_bytes).hexdigest()
        super().__init__(tokenizer, vocabulary[END_OF_DOCUMENT], fingerprint, cut_before_spaces=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _parse_vocabulary(content: bytes, path: Path) -> dict[str, int]:
    try:
        vocabulary = json.loads(content)
    except ValueError as error:
        raise UserError(f"vocab-file {path} is not JSON ({error}); GPT-2's is encoder.json or vocab.json") from error
    if not isinstance(vocabulary, dict) or not all(isinstance(token, int) for token in vocabulary.values()):
        raise UserError(
            f"vocab-file {path} does not map tokens to ids; GPT-2's is encoder.json or vocab.json "
            "(for a tokenizer.json use tokenizer-type HFTokenizer)"
        )
    return vocabulary


def _parse_merges(content: bytes, path: Path) -> list[tuple[str, str]]:
    """Lines `left right`, best merge first; an optional first line `#version: ...`."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"merge-file {path} is not UTF-8: {error}") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise UserError(f"merge-file {path}, line {number}: expected two tokens, found {line[:60]!r}")
        merges.append((pair[0], pair[1]))
    return merges


def _spaces_begin_pieces(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a cut between a character that is not white space and a space or newline never changes the ids.

    GPT-2's splitting pattern always begins a new piece there. Anything in the file that could look further (a
    normalizer, a post-processor that adds tokens, added tokens with white space in or around them) rules it out.
    """
    settings = json.loads(tokenizer.to_str())
    split, finish = settings.get("pre_tokenizer") or {}, settings.get("post_processor") or {"type": "ByteLevel"}
    plain_split = split.get("type") == "ByteLevel" and split.get("use_regex", True) and not split["add_prefix_space"]
    plain_tokens = all(
        not re.search(r"\s", token["content"]) and not (token["lstrip"] or token["rstrip"] or token["single_word"])
        for token in settings["added_tokens"]
    )
    return bool(plain_split and plain_tokens and settings.get("normalizer") is None and finish["type"] == "ByteLevel")


def _cut(text: str, length: int) -> Iterable[str]:
    """Pieces of about `length` characters, cut before spaces and newlines."""
    start = 0
    while start < len(text):
        boundary = _BEFORE_SPACE.search(text, start + length)
        end = len(text) if boundary is None else boundary.start()
        yield text[start:end]
        start = end
