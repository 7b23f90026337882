"""Parses chunks of input into documents. Runs in the worker processes, so it must not import torch."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.data.readers import TextChunk
from megatron.utils.errors import UserError


@dataclass(frozen=True)
class DocumentOptions:
    """How documents are read from chunks.

    Attributes:
        keys: keys of the JSON objects; the text of each becomes a dataset. A plain text belongs to the first key.
        subset: keep only documents with this meta.pile_set_name. Documents without that field are kept.
        append_eod: end every document with the end-of-document token.
        ftfy: repair broken Unicode with the package ftfy.
        skip_bad: skip and count unreadable documents instead of failing.
    """

    keys: tuple[str, ...] = ("text",)
    subset: str | None = None
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False


@dataclass(frozen=True)
class Document:
    """A document: one text per key, and its meta.pile_set_name if it has one."""

    texts: list[str]
    subset: str | None = None


@dataclass
class SkippedDocuments:
    """Documents that were skipped.

    Attributes:
        bad: an error message for each unreadable document, starting with its file and line.
        other_subsets: number of documents of each other subset.
    """

    bad: list[str] = field(default_factory=list)
    other_subsets: Counter[str] = field(default_factory=Counter)


class BadDocument(Exception):
    """A document is unreadable. `line` is the line of the problem within the document, from 1."""

    def __init__(self, message: str, line: int = 1):
        super().__init__(message)
        self.line = line


def parse_documents(chunk: TextChunk, options: DocumentOptions, skipped: SkippedDocuments) -> Iterator[Document]:
    """Yield the documents of a chunk, and record unreadable ones and those of other subsets in `skipped`.

    Raises:
        UserError: a document is unreadable and options.skip_bad is False.
    """
    for first_line, parse in _records(chunk):
        try:
            document = _to_document(parse(), options)
        except BadDocument as error:
            problem = f"{chunk.source}, {chunk.unit} {first_line + error.line - 1}: {error}"
            if not options.skip_bad:
                raise UserError(
                    f"{problem}; fix it, or pass --bad-documents skip to skip unreadable documents"
                ) from error
            skipped.bad.append(problem)
            continue
        if document.subset is not None and options.subset not in (None, document.subset):
            skipped.other_subsets[document.subset] += 1
        else:
            yield document


def read_texts(chunks: Iterable[TextChunk], options: DocumentOptions) -> Iterator[str]:
    """Yield every text of every document. Raises what `parse_documents` raises."""
    for chunk in chunks:
        for document in parse_documents(chunk, options, SkippedDocuments()):
            yield from document.texts


def _records(chunk: TextChunk) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the first line of each record in a chunk, and a function that parses it or raises BadDocument."""
    if chunk.kind == "text":
        yield chunk.first_line, partial(_decode, chunk.content)
    elif chunk.kind == "list":
        try:
            values = _parse_json(chunk.content)
        except BadDocument as error:
            raise UserError(f"{chunk.source}: {error}") from error
        for value in values:
            yield 1, partial(lambda value: value, value)  # lm-dataformat writes the whole list on one line
    else:
        for line, content in enumerate(chunk.content.split(b"\n"), start=chunk.first_line):
            if content and not content.isspace():
                yield line, partial(_parse_json, content)


def _decode(content: bytes) -> str:
    try:
        # Windows editors write a byte order mark, which is not part of the text.
        return content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line_start = error.object.rfind(b"\n", 0, error.start) + 1
        raise BadDocument(
            f"not UTF-8 (0x{byte:02x} is byte {error.start - line_start + 1} of the line)",
            line=1 + error.object.count(b"\n", 0, error.start),
        ) from error


def _parse_json(content: bytes) -> Any:
    try:
        return json.loads(_decode(content))
    except ValueError as error:
        raise BadDocument(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadDocument("JSON nested too deeply") from error


def _to_document(value: object, options: DocumentOptions) -> Document:
    if isinstance(value, str) and len(options.keys) == 1:
        return Document([_checked_text(value, options)])
    if not isinstance(value, dict):
        expected = "an object" if len(options.keys) > 1 else "an object or a string"
        raise BadDocument(f"expected {expected}, found {type(value).__name__}")
    meta = value.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    subset = None if name is None else str(name)
    if subset is not None and options.subset not in (None, subset):
        return Document([], subset)  # skipped, so its texts may be invalid
    texts = []
    for key in options.keys:
        if key not in value:
            present = ", ".join(list(value)[:8]) or "none"
            raise BadDocument(f"no key {key!r}; its keys: {present}")
        text = value[key]
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)  # as lm-dataformat joins paragraphs
        if not isinstance(text, str):
            raise BadDocument(f"{key!r} is not a string but {type(text).__name__}")
        texts.append(_checked_text(text, options))
    return Document(texts, subset)


def _checked_text(text: str, options: DocumentOptions) -> str:
    """Return the text, repaired if options.ftfy. Raises BadDocument if it cannot be encoded as UTF-8."""
    if options.ftfy:
        import ftfy

        text = ftfy.fix_text(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON escapes can express half of a surrogate pair, which no tokenizer accepts.
        raise BadDocument(f"unpaired surrogate at character {error.start}") from error
    return text
