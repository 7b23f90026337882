"""Chunks to token ids: what each worker process does. Imports no torch."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.data.chunks import Chunk
from megatron.data.indexed_format import id_type_for
from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class DocumentOptions:
    """How documents are taken from chunks.

    Attributes:
        keys: of the JSON objects, each a text of its own; plain texts are the first one's.
        subset: keep only documents whose meta.pile_set_name is this; documents without that entry are kept.
        append_eod: end every document with the end-of-document token.
        ftfy: mend broken Unicode with the package ftfy.
        skip_bad: count unreadable documents instead of failing.
    """

    keys: tuple[str, ...] = ("text",)
    subset: str | None = None
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False


@dataclass
class EncodedChunk:
    """The documents of some chunks; the lists are per key.

    Attributes:
        tokens: ids of all documents, one after the other.
        lengths: int32, tokens in each document.
        text_bytes: UTF-8 bytes of the texts that became tokens.
        empty: documents without text, left out.
        bad: what was wrong with each unreadable document, beginning with its file and line.
        other_subsets: how many documents belonged to which other subset.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    other_subsets: Counter = field(default_factory=Counter)


class BadDocument(Exception):
    """An unreadable document; the message says what is wrong with it, `line` where in the document (from 1)."""

    def __init__(self, message: str, line: int = 1):
        super().__init__(message)
        self.line = line


def encode_chunks(chunks: Sequence[Chunk], tokenizer: Tokenizer, options: DocumentOptions) -> EncodedChunk:
    """Parse and tokenize.

    Raises:
        UserError: an unreadable document, unless options.skip_bad.
    """
    result = EncodedChunk()
    texts: list[list[str]] = [[] for _ in options.keys]
    for chunk in chunks:
        for document in _documents(chunk, options, result):
            for column, text in zip(texts, document.texts, strict=True):
                column.append(text)
    dtype = id_type_for(tokenizer.vocab_size)
    for column in texts:
        ids = tokenizer.tokenize_batch(column)
        kept = [document for document in ids if document]
        if options.append_eod:
            for document in kept:
                document.append(tokenizer.eod)
        lengths = np.array([len(document) for document in kept], dtype=np.int32)
        tokens = np.empty(int(lengths.sum(dtype=np.int64)), dtype=dtype)
        start = 0
        for document in kept:
            tokens[start : start + len(document)] = document
            start += len(document)
        result.tokens.append(tokens)
        result.lengths.append(lengths)
        result.text_bytes.append(sum(len(text.encode("utf-8")) for text in column))
        result.empty.append(len(ids) - len(kept))
    return result


def read_texts(chunks: Iterable[Chunk], options: DocumentOptions) -> Iterator[str]:
    """Every text of every document, for training a tokenizer. Raises as `encode_chunks` does."""
    for chunk in chunks:
        for document in _documents(chunk, options, EncodedChunk()):
            yield from document.texts


@dataclass
class SubsetCount:
    """How much there is of one subset of the Pile; end-of-document tokens are not counted."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, other: "SubsetCount") -> None:
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes


@dataclass
class SubsetCounts:
    """Counts by meta.pile_set_name (None: documents without), and the unreadable documents as in EncodedChunk."""

    subsets: dict[str | None, SubsetCount] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def count_subsets(chunks: Sequence[Chunk], tokenizer: Tokenizer, options: DocumentOptions) -> SubsetCounts:
    """Tokenize and count; raises as `encode_chunks` does."""
    noted = EncodedChunk()
    documents = [document for chunk in chunks for document in _documents(chunk, options, noted)]
    counts: dict[str | None, SubsetCount] = {}
    for column in range(len(options.keys)):
        texts = [document.texts[column] for document in documents]
        for document, text, ids in zip(documents, texts, tokenizer.tokenize_batch(texts), strict=True):
            one = SubsetCount(int(column == 0), len(ids), len(text.encode("utf-8")))
            counts.setdefault(document.subset, SubsetCount()).add(one)
    return SubsetCounts(counts, noted.bad)


@dataclass(frozen=True)
class _Document:
    """A readable document: its texts, one per key, and its meta.pile_set_name, if it has one."""

    texts: list[str]
    subset: str | None


def _documents(chunk: Chunk, options: DocumentOptions, result: EncodedChunk) -> Iterator[_Document]:
    """Every readable document; notes the others in `result`."""
    for first_line, parse in _records(chunk):
        try:
            document = _parsed(parse(), options)
        except BadDocument as error:
            problem = f"{chunk.source}, {chunk.unit} {first_line + error.line - 1}: {error}"
            if not options.skip_bad:
                raise UserError(f"{problem}; mend it, or pass --bad-documents skip to leave such ones out") from error
            result.bad.append(problem)
            continue
        if options.subset is not None and document.subset not in (None, options.subset):
            result.other_subsets[document.subset] += 1
        else:
            yield document


def _records(chunk: Chunk):
    """For each record the number of its first line, and a function that parses it."""
    if chunk.kind == "text":
        yield chunk.first_line, lambda: _decode(chunk.content)
    elif chunk.kind == "list":
        # lm-dataformat writes such a list on one line.
        for value in _parse_list(chunk):
            yield 1, lambda value=value: value
    else:
        for line, content in enumerate(chunk.content.split(b"\n"), start=chunk.first_line):
            if content and not content.isspace():
                yield line, lambda content=content: _parse_json(content)


def _parse_list(chunk: Chunk) -> list:
    try:
        return _parse_json(chunk.content)
    except BadDocument as error:
        raise UserError(f"{chunk.source}: {error}") from error


def _decode(content: bytes) -> str:
    try:
        # A byte order mark, as Windows editors write it, is no part of the text.
        return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line_start = error.object.rfind(b"\n", 0, error.start) + 1
        raise BadDocument(
            f"not UTF-8 (0x{byte:02x} is byte {error.start - line_start + 1} of the line)",
            line=1 + error.object.count(b"\n", 0, error.start),
        ) from error


def _parse_json(content: bytes):
    try:
        return json.loads(_decode(content))
    except ValueError as error:
        raise BadDocument(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadDocument("JSON nested too deeply") from error


def _parsed(value, options: DocumentOptions) -> _Document:
    if isinstance(value, str) and len(options.keys) == 1:
        return _Document([_mended(value, options)], None)
    if not isinstance(value, dict):
        expected = "an object" if len(options.keys) > 1 else "an object or a text"
        raise BadDocument(f"expected {expected}, found {type(value).__name__}")
    meta = value.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    subset = None if name is None else str(name)
    if options.subset is not None and subset not in (None, options.subset):
        return _Document([], subset)  # whatever it holds, it is not wanted
    texts = []
    for key in options.keys:
        if key not in value:
            present = ", ".join(list(value)[:8]) or "none"
            raise BadDocument(f"no key {key!r}; its keys: {present}")
        text = value[key]
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)  # as lm-dataformat joins paragraphs
        if not isinstance(text, str):
            raise BadDocument(f"{key!r} is not a text but {type(text).__name__}")
        texts.append(_mended(text, options))
    return _Document(texts, subset)


def _mended(text: str, options: DocumentOptions) -> str:
    if options.ftfy:
        import ftfy

        text = ftfy.fix_text(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can escape one half of a surrogate pair; no tokenizer can take that.
        raise BadDocument(f"half a surrogate pair at character {error.start}") from error
    return text
