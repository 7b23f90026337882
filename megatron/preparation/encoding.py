"""Tokenizes documents, in several processes if requested. Results are returned in the order of the
input.

Worker processes import this module, so it must not import torch.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

from megatron.data.indexed_dataset import id_type_for
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, parse_documents
from megatron.preparation.readers import ChunkSource, ReadPosition, TextChunk
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError
from megatron.utils.processes import exit_with_parent

# Minimum input per work item, so that sending it to a worker is cheap compared to tokenizing it.
WORK_ITEM_BYTES = 1 << 19
ITEMS_IN_FLIGHT_PER_WORKER = 3

MAX_NAMED_TOKENS = 5
_LONG_TEXT = 1 << 20  # characters or ids; longer texts are processed in pieces
_MAX_LENGTH = np.iinfo(np.int32).max  # tokens of a document in an .idx


@dataclass
class EncodedDocuments:
    """The tokenized documents of some chunks. The lists have one entry per key.

    Attributes:
        tokens: concatenated ids of all documents.
        lengths: int32, tokens in each document.
        text_bytes: UTF-8 bytes of the tokenized texts.
        empty: number of documents skipped because they have no text.
        special: id -> count of the special tokens in the texts, and of the unknown token.
        skipped: the other skipped documents.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    special: list[Counter[int]] = field(default_factory=list)
    skipped: SkippedDocuments = field(default_factory=SkippedDocuments)


def encode_chunks(
    chunks: Sequence[TextChunk], tokenizer: Tokenizer, options: DocumentOptions
) -> EncodedDocuments:
    """Parse and tokenize chunks. Memory for a long text is bounded by that of the text and of its
    ids.

    Raises UserError if a document is unreadable and options.skip_bad is False, or has more than
    2^31 - 1 tokens.
    """
    # Parse all documents of the chunks.
    encoded = EncodedDocuments()
    documents: list[list[str]] = []
    for chunk in chunks:
        documents += parse_documents(chunk, options, encoded.skipped, tokenizer)

    # End and start of a document, as bytes of the id type.
    dtype = id_type_for(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod] * options.append_eod, dtype=dtype).tobytes()
    bos_bytes = 0 if tokenizer.bos is None else dtype.itemsize
    counted = list(tokenizer.special_ids)
    if tokenizer.unknown_id is not None:
        counted.append(tokenizer.unknown_id)
    for column in range(len(options.keys)):
        # Take the texts of a column, so that their memory is freed with this list.
        texts = [document[column] for document in documents]
        for document in documents:
            document[column] = ""
        encoded.text_bytes.append(sum(len(text.encode("utf-8")) for text in texts))

        # Ids of all documents in a row. A document without text is dropped.
        tokens, lengths = bytearray(), []
        for pieces in _tokenize(texts, tokenizer):
            start = len(tokens)
            for ids in pieces:
                tokens += np.array(ids, dtype=dtype).tobytes()
            if len(tokens) - start <= bos_bytes:
                del tokens[start:]
            else:
                tokens += eod
                lengths.append((len(tokens) - start) // dtype.itemsize)
        if lengths and max(lengths) > _MAX_LENGTH:
            raise UserError(
                f"a document has {max(lengths):,} tokens, but an .idx stores at most "
                f"{_MAX_LENGTH:,}"
            )

        # Special tokens that the text itself contained.
        array = np.frombuffer(tokens, dtype=dtype)
        special: Counter[int] = Counter()
        for start in range(0, len(array), _LONG_TEXT):  # isin needs more memory than the ids
            part = array[start : start + _LONG_TEXT]
            special.update(part[np.isin(part, counted)].tolist())
        # A document has one at its end, and perhaps one at its start.
        if options.append_eod:
            special[tokenizer.eod] -= len(lengths)
        if tokenizer.bos in counted:
            special[tokenizer.bos] -= len(lengths)

        # Store the column.
        encoded.tokens.append(array)
        encoded.special.append(+special)  # without zeros
        encoded.lengths.append(np.array(lengths, dtype=np.int32))
        encoded.empty.append(len(documents) - len(lengths))
    return encoded


def special_lines(counts: Counter[int], tokenizer: Tokenizer) -> Iterator[str]:
    """What to tell the user about the special tokens in documents: id -> count."""
    unknown = tokenizer.unknown_id
    if unknown is not None and counts[unknown]:
        yield (
            f"warning: {counts[unknown]:,} tokens are the unknown token "
            f"{tokenizer.detokenize([unknown])!r}: the tokenizer has no token for that text, which "
            "is lost"
        )
    others = Counter({token: count for token, count in counts.items() if token != unknown})
    if not others:
        return
    names = []
    for token, count in others.most_common(MAX_NAMED_TOKENS):
        effect = " (ends a document)" if token == tokenizer.eod else ""
        names.append(f"{count:,} {tokenizer.detokenize([token])!r}{effect}")
    yield (
        f"{others.total():,} special tokens in documents were recognized, such as "
        f"{', '.join(names)}"
    )


def _tokenize(texts: list[str], tokenizer: Tokenizer) -> Iterator[Iterable[list[int]]]:
    """Yield the ids of each text, in pieces. If one is long, empties the list on the way."""
    if any(len(text) > _LONG_TEXT for text in texts):
        texts.reverse()
        while texts:
            pieces = deque(tokenizer.pieces(texts.pop()))
            yield (tokenizer.tokenize(pieces.popleft()) for _ in range(len(pieces)))
    else:
        for ids in tokenizer.tokenize_batch(texts):
            yield [ids]


@dataclass(frozen=True)
class WorkItem:
    """Chunks that are tokenized together, and the position of the source after them."""

    chunks: list[TextChunk]
    position: ReadPosition
    bytes_read: int


def work_items(source: ChunkSource, start: ReadPosition) -> Iterator[WorkItem]:
    """Read the source from `start` on, and group small chunks."""
    chunks: list[TextChunk] = []
    size = 0
    for chunk in source.chunks(start):
        chunks.append(chunk)
        size += len(chunk.content)
        if size >= WORK_ITEM_BYTES:
            yield WorkItem(chunks, source.position, source.bytes_read)
            chunks, size = [], 0
    if chunks:
        yield WorkItem(chunks, source.position, source.bytes_read)


def encode_in_order(
    items: Iterator[WorkItem],
    tokenizer: Tokenizer,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    workers: int,
) -> Iterator[tuple[WorkItem, EncodedDocuments]]:
    """Yield every item with its encoded documents, in order. The number of items in memory is
    bounded. With one worker, everything runs in this process, with `tokenizer`, which
    `tokenizer_files.build()` has returned.

    Raises UserError if `encode_chunks` raises it, or if a worker process was killed.
    """
    if workers == 1:
        for item in items:
            yield item, encode_chunks(item.chunks, tokenizer, options)
        return
    # "spawn": a forked child would inherit locks held by the tokenizer's threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_files, options))
    in_flight: deque[tuple[WorkItem, Future[EncodedDocuments]]] = deque()
    try:
        for item in items:
            future = executor.submit(_encode_in_worker, item.chunks)
            in_flight.append((WorkItem([], item.position, item.bytes_read), future))
            if len(in_flight) >= ITEMS_IN_FLIGHT_PER_WORKER * workers:
                oldest, future = in_flight.popleft()
                yield oldest, future.result()
        while in_flight:
            oldest, future = in_flight.popleft()
            yield oldest, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely because the machine is out of memory; use fewer "
            "--workers or shorter documents"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker_state: tuple[Tokenizer, DocumentOptions] | None = None


def _start_worker(tokenizer_files: TokenizerFiles, options: DocumentOptions) -> None:
    global _worker_state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one worker per processor already
    exit_with_parent()
    _worker_state = (tokenizer_files.build(), options)


def _encode_in_worker(chunks: Sequence[TextChunk]) -> EncodedDocuments:
    assert _worker_state is not None
    return encode_chunks(chunks, *_worker_state)
