"""Tokenizers based on Hugging Face's `tokenizers` library: tokenizer.json files, GPT-2's
vocabulary, BPE training.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron.tokenizer.interface import END_OF_DOCUMENT, TOKENIZER_CONFIG, SpecialTokens, Tokenizer
from megatron.utils.errors import UserError, library_errors
from megatron.utils.files import read_file

# The library needs about 100 bytes of memory per token of the text it encodes, so longer texts are
# encoded in pieces.
_MAX_CHARACTERS = 1 << 20
_BEFORE_SPACE = re.compile(r"(?<=\S)(?=[ \n])")

# Characters with every byte of UTF-8: all of one byte and of two, and one for each first byte of
# three and of four.
_EVERY_BYTE = (
    *range(0x801),
    *range(0x1000, 0x10000, 0x1000),
    0x10000,
    0x40000,
    0x80000,
    0xC0000,
    0x100000,
)

# A text of code and prose, in several scripts.
SAMPLE = (
    "def main(count=10):\n\treturn [x * 3.14 for x in range(count)]  # naïve – 東京 🙂\n\n"
    "  The  end."
)
CHARACTERS_PER_TEXT = 64  # of `sample_texts`

# 256 byte symbols and the end-of-document token.
MIN_VOCAB_SIZE = 257


class _LibraryTokenizer(Tokenizer):
    """Encodes and decodes with a `tokenizers.Tokenizer`, whose post-processor `bos` replaces.
    `source` names its files in errors.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        source: str,
        eod: int,
        fingerprint: str,
        bos: int | None = None,
    ):
        self._source = source
        self._dropped_bytes = dropped_bytes(tokenizer, source)
        tokenizer.post_processor = None
        self._tokenizer = tokenizer
        self.eod = eod
        self.fingerprint = fingerprint
        self.bos = bos
        self._start: list[int] = []
        if bos is not None:
            self._start.append(bos)
        self._splittable = bos is None and _is_splittable(tokenizer)

        # Ids need not be contiguous. The embedding table must cover the largest one.
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def definition(self) -> str:
        return f"{self.eod} {self.bos} {self._tokenizer.to_str()}"

    def tokenize(self, text: str) -> list[int]:
        ids = list(self._start)
        with library_errors("the tokenizer cannot encode the text"):
            for piece in self.pieces(text):
                ids += self._tokenizer.encode(piece).ids
        self._check(text)
        return ids

    def pieces(self, text: str) -> Iterator[str]:
        if not self._splittable:
            return iter([text])
        return split_text(text, _MAX_CHARACTERS)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(text) > _MAX_CHARACTERS for text in texts):
            return [self.tokenize(text) for text in texts]
        with library_errors("the tokenizer cannot encode the texts"):
            encodings = self._tokenizer.encode_batch_fast(list(texts))
        for text in texts:
            self._check(text)
        return [self._start + encoding.ids for encoding in encodings]

    def problem(self, text: str) -> str | None:
        if not self._dropped_bytes:
            return None
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        if self._dropped_bytes.isdisjoint(text.encode()):
            return None
        characters = (each for each in text if not self._dropped_bytes.isdisjoint(each.encode()))
        character = next(characters)
        return (
            f"character {text.index(character)} is {character!r}, which {self._source} has no "
            "token for and would drop"
        )

    @property
    def special_ids(self) -> list[int]:
        return sorted({*self.special_tokens, self.eod})

    @property
    def special_tokens(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token_id: token.content for token_id, token in added if token.special}

    @cached_property
    def unknown_id(self) -> int | None:
        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.Unigram):  # it has no attribute for it
            unknown: int | None = json.loads(model.__getstate__())["unk_id"]
            return unknown
        return self._tokenizer.token_to_id(model.unk_token or "")

    def detokenize(self, ids: Sequence[int]) -> str:
        with library_errors("the tokenizer cannot decode the ids"):
            return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def byte_lengths(self) -> np.ndarray | None:
        # In a byte-level vocabulary each character of a token is one byte, except for marks of the
        # end or the middle of a word.
        model = self._tokenizer.model
        if not isinstance(self._tokenizer.decoder, tokenizers.decoders.ByteLevel):
            return None
        if getattr(model, "end_of_word_suffix", None):
            return None
        if getattr(model, "continuing_subword_prefix", None):
            return None

        # Special tokens stand for their text, except those around documents.
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[token_id] = len(token)
        for token_id, added_token in self._tokenizer.get_added_tokens_decoder().items():
            lengths[token_id] = len(added_token.content.encode("utf-8"))
        lengths[[self.eod, self.first]] = 0

        # Normalizers and pre-tokenizers that remove or replace any sequence of characters.
        normalizer, splits = self._tokenizer.normalizer, self._tokenizer.pre_tokenizer
        if normalizer is not None and not _keeps_text(json.loads(normalizer.__getstate__())):
            return None
        if splits is not None and b'"Removed"' in splits.__getstate__():
            return None

        # Others, and unknown tokens, may change the number of bytes.
        for text in (*sample_texts(), " first"):
            normal = unicodedata.normalize("NFC", text)
            if self.problem(normal) is not None:
                continue
            if lengths[self.tokenize(normal)].sum() != len(normal.encode()):
                return None
        return lengths


def _keeps_text(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer (as in tokenizer.json) is NFC, which changes few texts, or that of
    `CharLevelTokenizer` in exports, for NUL.
    """
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_text, normalizer["normalizers"]))
    return normalizer["type"] == "NFC" or normalizer.get("pattern") == {"String": "\0"}


def sample_texts() -> list[str]:
    """Texts with what normalizers and pre-tokenizers change: case, digits, accents, ligatures,
    other widths, line breaks, white space, and each character of Unicode's first plane.
    """
    texts = [
        SAMPLE,
        "1234567890 12 3",
        "ÀÉ e\u0301 \ufb01 \uff21\u2460",
        "HTTPServer's THE the",
        "x  \u00a0\u3000y",
        "a\r\nb\rc --- ... '' \"\" `` $$ d",
        "end \t ",
    ]
    for count in range(1, 33):
        texts.append(f"a{' ' * count}b" + "\n" * count + "c" + "\t" * count + "d")
    # Between letters, because some characters are combined.
    for start in range(0x20, 0x10000, CHARACTERS_PER_TEXT):
        characters = [chr(code) for code in range(start, start + CHARACTERS_PER_TEXT)]
        characters = [each for each in characters if not 0xD800 <= ord(each) < 0xE000]
        texts.append("x".join(["", *characters]))
    return texts


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer.json file.

    Documents end with `<|endoftext|>`, or else with the `eos_token` of the tokenizer_config.json in
    the same folder. Texts start with the token that the file's post-processor puts there, as in
    transformers. Tokens that it appends are left out, because a prompt, a context and a part of a
    document do not end a text.

    Truncation, padding and BPE dropout in the file are ignored (see `disable_effects`).

    Raises UserError if the file is not a tokenizer.json, has no end-of-document token, would drop
    characters (see `dropped_bytes`), or its post-processor does more than adding a token at the
    start and tokens at the end; and for a text of which it would drop a part.
    """

    name = "HFTokenizer"

    def __init__(self, path: Path):
        content = read_file(path)  # a tokenizer file with 260,000 tokens has 35 MB
        with library_errors(f"the tokenizers library cannot read {path} as a tokenizer.json"):
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        disable_effects(tokenizer)

        # The end of a document. Another token than GPT-2's changes the fingerprint.
        eod = tokenizer.token_to_id(END_OF_DOCUMENT)
        fingerprint = hashlib.sha256(content).hexdigest()
        if eod is None and (eos := SpecialTokens.next_to(path).eos) is not None:
            eod = tokenizer.token_to_id(eos)
            fingerprint = hashlib.sha256(content + f"eod {eod}".encode()).hexdigest()
        if eod is None:
            added = tokenizer.get_added_tokens_decoder().values()
            special = ", ".join(sorted(token.content for token in added if token.special))
            raise UserError(
                f"{path} has no {END_OF_DOCUMENT} token, which marks the end of a document (its "
                f"special tokens: {special or 'none'}), and no {TOKENIZER_CONFIG} in its folder "
                "names another (eos_token); add it with add_special_tokens of the tokenizers "
                "library"
            )
        bos = text_initial_token(tokenizer, path)
        super().__init__(tokenizer, str(path), eod, fingerprint, bos)


def disable_effects(tokenizer: tokenizers.Tokenizer) -> None:
    """Switch off what makes the ids depend on more than the text: training data must be neither cut
    nor padded, and with BPE dropout, which leaves out random merges, a text would have other ids
    each time.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None


def dropped_bytes(tokenizer: tokenizers.Tokenizer, source: str) -> frozenset[int]:
    """The bytes of UTF-8 that a byte-level BPE does not know, so that it would drop them from
    texts. Those of published models often lack a few control characters.

    Other models, and BPE with an unknown token, have a token for all characters or fail. Raises
    UserError for a BPE of characters that does not know all bytes.
    """
    model = tokenizer.model
    if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None:
        return frozenset()

    # Most vocabularies have the bytes of UTF-8 as symbols. Otherwise characters are symbols.
    symbols = "".join(map(chr, _EVERY_BYTE))
    values = symbols.encode()
    parts = json.loads(tokenizer.to_str())
    byte_level = '"ByteLevel"' in json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
    if byte_level:
        bytes_only = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ((symbols, _),) = bytes_only.pre_tokenize_str(symbols)

    # A symbol can have other tokens at the beginning, in the middle and at the end of a word.
    unknown = set()
    for symbol in set(symbols):
        word = 3 * symbol
        lengths = [token.offsets[1] - token.offsets[0] for token in model.tokenize(word)]
        if sum(lengths) < len(word.encode()):
            unknown.add(symbol)
    if byte_level:
        pairs = zip(symbols, values, strict=True)
        return frozenset(value for symbol, value in pairs if symbol in unknown)
    if unknown:
        raise UserError(
            f"{source} has no token for {len(unknown)} of {len(set(symbols))} symbols, such as "
            f"{min(unknown)!r}, so it would drop them from texts; set its unk_token, or train it "
            "with initial_alphabet=ByteLevel.alphabet()"
        )
    return frozenset()


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE, from its vocabulary and merges files.

    Special tokens in a text are not recognized: a literal `<|endoftext|>` becomes ordinary tokens,
    so the text of a document cannot end it.

    Raises UserError if the files are not GPT-2's vocabulary and merges, or do not belong together;
    and for a text of which they would drop a part.
    """

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: Path, merge_file: Path):
        content = read_file(vocab_file) + b"\0" + read_file(merge_file)
        with library_errors(
            f"merge-file {merge_file} and vocab-file {vocab_file} are not GPT-2's merges and its "
            "JSON of tokens and ids; for a tokenizer.json use tokenizer-type HFTokenizer"
        ):
            model = tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
            tokenizer = byte_level_tokenizer(model)

        # GPT-2's vocabulary has its end-of-document token.
        vocab = tokenizer.get_vocab()
        if END_OF_DOCUMENT not in vocab:
            raise UserError(
                f"vocab-file {vocab_file} has no {END_OF_DOCUMENT} token; in GPT-2's it is id 50256"
            )
        fingerprint = hashlib.sha256(content).hexdigest()
        super().__init__(tokenizer, f"vocab-file {vocab_file}", vocab[END_OF_DOCUMENT], fingerprint)


def text_initial_token(tokenizer: tokenizers.Tokenizer, source: str | Path) -> int | None:
    """The id of the token that the post-processor puts before every text; None if it puts none
    there.

    Raises UserError if it puts several tokens there, a token without an embedding, or does not keep
    the text once.
    """
    processor = tokenizer.post_processor
    if processor is None:
        return None

    # A text that has tokens, without and with the post-processor.
    with library_errors(f"{source}: the tokenizer cannot encode a text"):
        tokenizer.post_processor = None
        for text in ("a", *tokenizer.get_vocab()):
            if count := len(tokenizer.encode(text).ids):
                break
        tokenizer.post_processor = processor
        encoding = tokenizer.encode(text)

    # The text must be there once, after at most one token.
    added = encoding.special_tokens_mask
    if added.count(0) != count:
        raise UserError(
            f"{source}: its post_processor repeats or removes the text ({added.count(0)} instead "
            f"of {count} tokens)"
        )
    prefix = encoding.ids[: added.index(0)]
    if len(prefix) > 1:
        raise UserError(
            f"{source}: its post_processor puts {len(prefix)} tokens before every text; remove all "
            "but one from it"
        )
    if not prefix:
        return None
    if tokenizer.id_to_token(prefix[0]) is None:
        raise UserError(
            f"{source}: its post_processor adds the id {prefix[0]}, which is not in the vocabulary"
        )
    return prefix[0]


def train_bpe(
    texts: Iterable[str], vocab_size: int, progress: bool = False
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE with GPT-2's splitting pattern and no normalization, so decoding is
    lossless.

    Args:
        texts: the documents. Read once, in a streaming fashion.
        vocab_size: number of ids, including `<|endoftext|>` (id 0) and the 256 bytes. The result is
            smaller if the corpus runs out of pairs that occur twice.
        progress: show the library's progress bars on a terminal.

    Returns:
        a library tokenizer. `.save(path)` writes a tokenizer.json for
        `tokenizer-type: HFTokenizer`. The result is deterministic for the same texts in the same
        order.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocabulary size {vocab_size} is too small: a byte-level BPE has the 256 bytes and "
            f"{END_OF_DOCUMENT}, so at least {MIN_VOCAB_SIZE}"
        )

    # Pairs that occur once are not merged.
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def byte_level_tokenizer(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    """A tokenizer with GPT-2's splitting pattern, whose characters are bytes."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _is_splittable(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether splitting any text between a non-space character and a space or newline leaves its
    ids unchanged.

    GPT-2's pre-tokenization pattern always starts a new piece there. A normalizer, or added tokens
    that contain or absorb white space, break this property.
    """
    # GPT-2's pattern, and nothing before it.
    settings = json.loads(tokenizer.to_str())
    pre_tokenizer = settings.get("pre_tokenizer") or {}
    if settings.get("normalizer") is not None or pre_tokenizer.get("type") != "ByteLevel":
        return False
    if not pre_tokenizer.get("use_regex", True) or pre_tokenizer["add_prefix_space"]:
        return False

    # No added token with or around white space.
    for token in settings["added_tokens"]:
        if token["lstrip"] or token["rstrip"]:
            return False
        if re.search(r"\s", token["content"]):
            return False
    return True


def split_text(text: str, length: int) -> Iterator[str]:
    """Split `text` into pieces of about `length` characters that end before a space or newline."""
    start = 0
    while start < len(text):
        boundary = _BEFORE_SPACE.search(text, start + length)
        end = len(text) if boundary is None else boundary.start()
        yield text[start:end]
        start = end
