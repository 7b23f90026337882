"""Tokenizes documents, in several processes if requested. Results are returned in the order of the input.

Worker processes import this module, so it must not import torch.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from megatron.data.documents import DocumentOptions, SkippedDocuments, parse_documents
from megatron.data.indexed_dataset import id_type_for
from megatron.data.readers import ChunkSource, ReadPosition, TextChunk
from megatron.tokenizer import Tokenizer, TokenizerFiles
from megatron.utils.errors import UserError

Result = TypeVar("Result")

# Minimum input per work item, so that sending it to a worker is cheap compared to tokenizing it.
WORK_ITEM_BYTES = 1 << 19
ITEMS_IN_FLIGHT_PER_WORKER = 3


@dataclass
class EncodedDocuments:
    """The tokenized documents of some chunks. The lists have one entry per key.

    Attributes:
        tokens: concatenated ids of all documents.
        lengths: int32, tokens in each document.
        text_bytes: UTF-8 bytes of the tokenized texts.
        empty: number of documents skipped because they have no text.
        skipped: the other skipped documents.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[np.ndarray] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    skipped: SkippedDocuments = field(default_factory=SkippedDocuments)


def encode_chunks(chunks: Sequence[TextChunk], tokenizer: Tokenizer, options: DocumentOptions) -> EncodedDocuments:
    """Parse and tokenize chunks.

    Raises:
        UserError: a document is unreadable and options.skip_bad is False.
    """
    encoded = EncodedDocuments()
    documents = [document for chunk in chunks for document in parse_documents(chunk, options, encoded.skipped)]
    dtype = id_type_for(tokenizer.vocab_size)
    for column in range(len(options.keys)):
        texts = [document.texts[column] for document in documents]
        all_ids = tokenizer.tokenize_batch(texts)
        nonempty = [ids for ids in all_ids if ids]
        if options.append_eod:
            for ids in nonempty:
                ids.append(tokenizer.eod)
        lengths = np.array([len(ids) for ids in nonempty], dtype=np.int32)
        tokens = np.empty(int(lengths.sum(dtype=np.int64)), dtype=dtype)
        start = 0
        for ids in nonempty:
            tokens[start : start + len(ids)] = ids
            start += len(ids)
        encoded.tokens.append(tokens)
        encoded.lengths.append(lengths)
        encoded.text_bytes.append(sum(len(text.encode("utf-8")) for text in texts))
        encoded.empty.append(len(all_ids) - len(nonempty))
    return encoded


@dataclass
class SubsetCount:
    """Size of one subset of the Pile, without end-of-document tokens."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, count: "SubsetCount") -> None:
        self.documents += count.documents
        self.tokens += count.tokens
        self.text_bytes += count.text_bytes


@dataclass
class SubsetCounts:
    """Counts by meta.pile_set_name (None for documents without one), and error messages of unreadable documents."""

    subsets: dict[str | None, SubsetCount] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def count_subsets(chunks: Sequence[TextChunk], tokenizer: Tokenizer, options: DocumentOptions) -> SubsetCounts:
    """Parse and tokenize chunks, and count per subset. Raises what `encode_chunks` raises."""
    skipped = SkippedDocuments()
    documents = [document for chunk in chunks for document in parse_documents(chunk, options, skipped)]
    counts = SubsetCounts(bad=skipped.bad)
    for column in range(len(options.keys)):
        texts = [document.texts[column] for document in documents]
        for document, text, ids in zip(documents, texts, tokenizer.tokenize_batch(texts), strict=True):
            count = counts.subsets.setdefault(document.subset, SubsetCount())
            count.add(SubsetCount(int(column == 0), len(ids), len(text.encode("utf-8"))))
    return counts


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


def check_workers(workers: int) -> None:
    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1")


def process_in_order(
    items: Iterator[WorkItem],
    function: Callable[[Sequence[TextChunk], Tokenizer, DocumentOptions], Result],
    tokenizer: Tokenizer,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    workers: int,
) -> Iterator[tuple[WorkItem, Result]]:
    """Yield every item with the result of `function`, in order. The number of items in memory is bounded.

    Args:
        items: from `work_items`.
        function: `encode_chunks` or `count_subsets`; must be importable by name.
        tokenizer: what `tokenizer_files.build()` returned.
        workers: number of worker processes. With 1, everything runs in this process.

    Raises:
        UserError: raised by `function`, or a worker process was killed.
    """
    check_workers(workers)
    if workers == 1:
        for item in items:
            yield item, function(item.chunks, tokenizer, options)
        return
    # "spawn": a forked child would inherit locks held by the tokenizer's threads.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_files, options))
    in_flight: deque[tuple[WorkItem, Future[Result]]] = deque()
    try:
        for item in items:
            future = executor.submit(_call_in_worker, function, item.chunks)
            in_flight.append((WorkItem([], item.position, item.bytes_read), future))
            if len(in_flight) >= ITEMS_IN_FLIGHT_PER_WORKER * workers:
                oldest, future = in_flight.popleft()
                yield oldest, future.result()
        while in_flight:
            oldest, future = in_flight.popleft()
            yield oldest, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely because the machine is out of memory; use fewer --workers or shorter "
            "documents"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker_state: tuple[Tokenizer, DocumentOptions] | None = None


def _start_worker(tokenizer_files: TokenizerFiles, options: DocumentOptions) -> None:
    global _worker_state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one worker per processor already
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        # If the parent is killed, the worker would otherwise wait for its next item forever.
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _worker_state = (tokenizer_files.build(), options)


def _call_in_worker(
    function: Callable[[Sequence[TextChunk], Tokenizer, DocumentOptions], Result], chunks: Sequence[TextChunk]
) -> Result:
    assert _worker_state is not None
    return function(chunks, *_worker_state)
