"""Parses chunks of input into documents. Runs in worker processes, so it must not import torch."""

import codecs
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.preparation.readers import TextChunk
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError, visible

_LONG_LINE = 1 << 20
_MAX_EXAMPLES = 5
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class DocumentOptions:
    """How documents are read from chunks.

    Attributes:
        keys: keys of the JSON objects; the text of each becomes a dataset. Plain texts are an error
            with several keys.
        subset: keep only documents with this meta.pile_set_name. Documents without that field are
            kept.
        append_eod: end every document with the end-of-document token.
        ftfy: repair broken Unicode with the package ftfy.
        skip_bad: skip and count unreadable documents instead of failing.

    Raises UserError if ftfy is not installed.
    """

    keys: tuple[str, ...] = ("text",)
    subset: str | None = None
    append_eod: bool = False
    ftfy: bool = False
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if self.ftfy and importlib.util.find_spec("ftfy") is None:
            raise UserError(
                "--ftfy needs the package ftfy, which is not installed: pip install ftfy"
            )


@dataclass
class SkippedDocuments:
    """Documents that were skipped for any key.

    Attributes:
        bad: number of unreadable documents.
        examples: messages about the first few of them, each starting with its file and line.
        other_subsets: number of documents of each other subset.
        without_subset: number of JSON objects that were not skipped, although a subset was to be
            selected, because they do not name theirs.
    """

    bad: int = 0
    examples: list[str] = field(default_factory=list)
    other_subsets: dict[str, int] = field(default_factory=dict)
    without_subset: int = 0

    def add(self, other: "SkippedDocuments") -> None:
        self.bad += other.bad
        self.examples = (self.examples + other.examples)[:_MAX_EXAMPLES]
        for name, count in other.other_subsets.items():
            self.other_subsets[name] = self.other_subsets.get(name, 0) + count
        self.without_subset += other.without_subset

    def lines(self) -> list[str]:
        """Lines about the unreadable documents, and those without a subset, for the user."""
        lines = [f"skipped: {visible(problem)}" for problem in self.examples]
        more = self.bad - len(self.examples)
        if more:
            lines.append(f"skipped: {more:,} more")
        if self.without_subset:
            lines.append(
                f"warning: {self.without_subset:,} documents have no meta.pile_set_name, so they "
                "were kept, whatever their subset"
            )
        return lines


class BadDocument(Exception):
    """A document is unreadable. `line` is the line of the problem within the document, from 1."""

    def __init__(self, message: str, line: int = 1):
        super().__init__(message)
        self.line = line


def parse_documents(
    chunk: TextChunk,
    options: DocumentOptions,
    skipped: SkippedDocuments,
    tokenizer: Tokenizer | None = None,
) -> Iterator[list[str]]:
    """Yield the texts of each document of a chunk, one per key; record the others in `skipped`.

    tokenizer: a document with a text that it cannot represent counts as unreadable.

    Raises UserError if a document is unreadable and options.skip_bad is False.
    """
    for first_line, parse in _records(chunk):
        try:
            texts = _texts(parse(), options, skipped)
            if tokenizer is not None:
                _check_tokenizable(texts or [], tokenizer)
        except BadDocument as error:
            problem = f"{chunk.source}, {chunk.unit} {first_line + error.line - 1}: {error}"
            if not options.skip_bad:
                raise UserError(
                    f"{problem}; fix it, or pass --bad-documents skip to skip unreadable documents"
                ) from error
            skipped.add(SkippedDocuments(1, [problem]))
            continue
        if texts is not None:
            yield texts


def read_texts(
    chunks: Iterable[TextChunk], options: DocumentOptions, skipped: SkippedDocuments
) -> Iterator[str]:
    """Yield every text of every document, and count the skipped ones, as `parse_documents`."""
    for chunk in chunks:
        for texts in parse_documents(chunk, options, skipped):
            yield from texts


def _records(chunk: TextChunk) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the first line of each record in a chunk, and a function that parses it or raises
    BadDocument.

    The function must be called before the next record is requested.
    """
    if chunk.kind == "text":
        yield chunk.first_line, lambda: _decode(chunk.take_content())
        return
    if chunk.kind == "list":
        try:
            values = _parse_json([memoryview(chunk.take_content())])
        except BadDocument as error:
            raise UserError(f"{chunk.source}: {error}") from error

        # lm-dataformat writes the whole list on one line.
        for value in values:
            yield 1, partial(lambda value: value, value)
        return

    # A view, because a copy of a very long line would be in memory a second time.
    content = chunk.take_content()
    view, line, start = memoryview(content), chunk.first_line, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        piece = [view[start:end]]
        size, is_last = end - start, end + 1 >= len(content)
        if is_last:
            content, view = b"", memoryview(b"")  # so that parsing frees the only line of a chunk
        if size > _LONG_LINE or bytes(piece[0]).strip():
            yield line, partial(_parse_json, piece)
        line, start = line + 1, end + 1


def _decode(content: bytes | memoryview) -> str:
    try:
        # Windows editors write a byte order mark, which is not part of the text.
        if content[:3] == codecs.BOM_UTF8:
            content = content[3:]
        return str(content, "utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line_start = error.object.rfind(b"\n", 0, error.start) + 1
        raise BadDocument(
            f"not UTF-8 (0x{byte:02x} is byte {error.start - line_start + 1} of the line)",
            line=1 + error.object.count(b"\n", 0, error.start),
        ) from error


def _parse_json(content: list[memoryview]) -> Any:
    """Parse the only item of a list, and remove it, so that a long line is freed after decoding."""
    text = _decode(content.pop())
    try:
        return json.loads(text)
    except ValueError as error:  # JSONDecodeError, or a number of too many digits
        raise BadDocument(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadDocument("JSON nested too deeply") from error


def _texts(value: object, options: DocumentOptions, skipped: SkippedDocuments) -> list[str] | None:
    """The text of each key of a document; None, and counted, if it is of another subset."""
    if isinstance(value, str) and len(options.keys) == 1:
        return [_checked_text(value, options)]
    if not isinstance(value, dict):
        expected = "an object" if len(options.keys) > 1 else "an object or a string"
        raise BadDocument(f"expected {expected}, found {type(value).__name__}")

    # Texts of other subsets may be invalid.
    meta = value.get("meta")
    name = meta.get("pile_set_name") if isinstance(meta, dict) else None
    if name is not None and options.subset not in (None, str(name)[:200]):
        skipped.add(SkippedDocuments(other_subsets={str(name)[:200]: 1}))
        return None
    texts = []
    for key in options.keys:
        if key not in value:
            present = ", ".join(list(value)[:8]) or "none"
            raise BadDocument(f"no key {key!r}; its keys: {present[:200]}")
        text = value[key]
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            text = "\n\n".join(text)  # as lm-dataformat joins paragraphs
        if not isinstance(text, str):
            raise BadDocument(f"{key!r} is not a string but {type(text).__name__}")
        texts.append(_checked_text(text, options))
    if name is None and options.subset is not None:
        skipped.add(SkippedDocuments(without_subset=1))
    return texts


def _check_tokenizable(texts: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raises BadDocument if the tokenizer cannot represent a text."""
    for text in texts:
        problem = tokenizer.problem(text)
        if problem is not None:
            raise BadDocument(problem)


def _checked_text(text: str, options: DocumentOptions) -> str:
    """Return the text, repaired if options.ftfy. Raises BadDocument if it is not valid Unicode."""
    if options.ftfy:
        import ftfy

        text = ftfy.fix_text(text)
    # JSON escapes can express half of a surrogate pair, which no tokenizer accepts.
    if not text.isascii() and (surrogate := _SURROGATE.search(text)):
        raise BadDocument(f"unpaired surrogate at character {surrogate.start()}")
    return text
