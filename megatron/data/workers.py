"""Tokenizing in several processes, with results in the order of the input."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from megatron.data.chunks import Chunk, ChunkSource, Position
from megatron.data.documents import DocumentOptions, encode_chunks
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.utils.errors import UserError

Result = TypeVar("Result")

# A task is at least this much text, so that handing it over costs little beside tokenizing it.
_BYTES_PER_TASK = 1 << 19
TASKS_IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True)
class TokenizerFiles:
    """Arguments of `build_tokenizer`, for the workers to build their own."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None

    def build(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


@dataclass(frozen=True)
class Task:
    """Chunks to tokenize together, and where the source was behind them."""

    chunks: list[Chunk]
    position: Position
    bytes_read: int


def check_workers(workers: int) -> None:
    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1")


def tasks(source: ChunkSource, start: Position) -> Iterator[Task]:
    """The source from `start` on, small chunks together."""
    chunks: list[Chunk] = []
    size = 0
    for chunk in source.chunks(start):
        chunks.append(chunk)
        size += len(chunk.content)
        if size >= _BYTES_PER_TASK:
            yield Task(chunks, source.position, source.bytes_read)
            chunks, size = [], 0
    if chunks:
        yield Task(chunks, source.position, source.bytes_read)


def encode_tasks(
    tasks: Iterator[Task],
    tokenizer: Tokenizer,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    workers: int,
    function: Callable[..., Result] = encode_chunks,
) -> Iterator[tuple[Task, Result]]:
    """`function` of every task, in order; a bounded number of tasks is in memory.

    Args:
        workers: processes; 1: this process does it all.
        function: of the chunks, the tokenizer and the options, as `encode_chunks`; importable by its name.

    Raises:
        UserError: what `encode_chunks` raises, or a worker was killed.
    """
    check_workers(workers)
    if workers == 1:
        for task in tasks:
            yield task, function(task.chunks, tokenizer, options)
        return
    # "spawn": a forked child would inherit locks that the tokenizer's threads or the progress bar may hold.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_files, options))
    try:
        in_flight = deque()
        for task in tasks:
            in_flight.append((Task([], task.position, task.bytes_read), executor.submit(_work, function, task.chunks)))
            if len(in_flight) >= TASKS_IN_FLIGHT_PER_WORKER * workers:
                done, result = in_flight.popleft()
                yield done, result.result()
        while in_flight:
            done, result = in_flight.popleft()
            yield done, result.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely killed for want of memory; use fewer --workers, or shorter documents"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_worker_state: tuple[Tokenizer, DocumentOptions] | None = None


def _start_worker(tokenizer_files: TokenizerFiles, options: DocumentOptions) -> None:
    global _worker_state
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker_state = (tokenizer_files.build(), options)


def _die_with_parent() -> None:
    """A worker whose parent was killed would wait for its next task for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(function: Callable[..., Result], chunks: list[Chunk]) -> Result:
    return function(chunks, *_worker_state)
