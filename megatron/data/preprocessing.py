"""Text files to `.bin/.idx`: one process reads, several tokenize, one writes.

Chunks travel in order through a bounded window, so the output does not depend on the number of workers, and memory not
on the size of the corpus.
"""

import importlib.util
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron.config.errors import UserError
from megatron.data.documents import DocumentOptions, EncodedChunk, encode_chunks
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.manifest import Manifest, manifest_path, write_manifest
from megatron.data.progress import CorpusProgress
from megatron.data.readers import Chunk
from megatron.tokenizer import Tokenizer, build_tokenizer

# A task is at least this much text, so that handing it over costs little beside tokenizing it.
_BYTES_PER_TASK = 1 << 20
_TASKS_IN_FLIGHT_PER_WORKER = 3


class ChunkSource(Protocol):
    """What is read: `megatron.data.readers.Corpus`, or anything like it."""

    total_bytes: int
    bytes_read: int

    def chunks(self) -> Iterator[Chunk]: ...


@dataclass(frozen=True)
class TokenizerFiles:
    """Arguments of `build_tokenizer`, for the workers to build their own."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None

    def build(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


@dataclass
class _Output:
    """The files of one key, and what went into them."""

    key: str
    prefix: str
    writer: IndexedWriter
    text_bytes: int = 0
    empty: int = 0

    def add(self, encoded: EncodedChunk, column: int) -> None:
        self.writer.add(encoded.tokens[column], encoded.lengths[column])
        self.text_bytes += encoded.text_bytes[column]
        self.empty += encoded.empty[column]

    def finish(
        self, tokenizer: Tokenizer, options: DocumentOptions, inputs: Sequence[str], rejected: "_Rejected"
    ) -> Manifest:
        """Put the files in place, and the manifest beside them."""
        manifest_path(self.prefix).unlink(missing_ok=True)  # it tells of files that are now replaced
        written = self.writer.finish()
        manifest = Manifest(
            documents=written.documents,
            tokens=written.tokens,
            text_bytes=self.text_bytes,
            largest_id=written.largest_id,
            sha256=written.sha256,
            dtype=written.dtype,
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            append_eod=options.append_eod,
            ftfy=options.ftfy,
            key=self.key,
            inputs=list(inputs),
            skipped_empty=self.empty,
            skipped_bad=rejected.bad,
            skipped_other=sum(rejected.other_subsets.values()),
        )
        write_manifest(self.prefix, manifest)
        return manifest


@dataclass
class _Rejected:
    """What was left out, whatever the key."""

    bad: int = 0
    examples: list[str] = field(default_factory=list)
    other_subsets: Counter = field(default_factory=Counter)

    def add(self, encoded: EncodedChunk) -> None:
        self.bad += len(encoded.bad)
        self.examples = (self.examples + encoded.bad)[:5]
        self.other_subsets.update(encoded.other_subsets)

    def check_found(self, tokens: int, options: DocumentOptions) -> None:
        """Say it if there is no text because all of it belonged to other subsets."""
        if tokens == 0 and self.other_subsets:
            found = ", ".join(f"{name} ({count:,})" for name, count in self.other_subsets.most_common(30))
            raise UserError(f"the input has no documents of subset {options.subset}; its subsets: {found}")


def preprocess(
    source: ChunkSource,
    output_prefix: str | Path,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    *,
    inputs: Sequence[str] = (),
    workers: int = 1,
    num_docs: int | None = None,
    log_interval: int = 100,
) -> dict[str, Manifest]:
    """Tokenize `source` into `{output_prefix}_{key}_document.bin/.idx/.json` for every key in `options.keys`.

    The files appear under these names only when whole and verified; the same input gives the same bytes for any number
    of workers.

    Args:
        inputs: names of what is read, for the manifest.
        workers: processes that tokenize; 1: this process does it all.
        num_docs: number of documents, if known, for the progress display.

    Returns:
        the manifest written for each key.

    Raises:
        UserError: an unreadable document (unless options.skip_bad) or file, no text at all, a full disk, a worker that
            was killed.
    """
    if workers < 1:
        raise UserError(f"workers is {workers}; it must be at least 1")
    if options.ftfy and importlib.util.find_spec("ftfy") is None:
        raise UserError("--ftfy needs the package ftfy, which is not installed: pip install ftfy")
    tokenizer = tokenizer_files.build()
    rejected = _Rejected()
    with ExitStack() as stack:
        outputs = []
        for key in options.keys:
            prefix = f"{output_prefix}_{key}_document"
            outputs.append(_Output(key, prefix, stack.enter_context(IndexedWriter(prefix, tokenizer.vocab_size))))
        progress = stack.enter_context(
            CorpusProgress(Path(output_prefix).name, source.total_bytes, num_docs, log_interval)
        )
        for encoded in _encode_all(_tasks(source), tokenizer, tokenizer_files, options, workers):
            for column, output in enumerate(outputs):
                output.add(encoded, column)
            rejected.add(encoded)
            first = outputs[0]
            progress.update(source.bytes_read, first.writer.documents, first.writer.tokens, first.text_bytes)
        rejected.check_found(outputs[0].writer.tokens, options)
        manifests = {output.key: output.finish(tokenizer, options, inputs, rejected) for output in outputs}
    for problem in rejected.examples:
        print(f"left out: {problem}")
    return manifests


def summary(prefix: str | Path, manifest: Manifest) -> str:
    """One line for the user on what was written."""
    left_out = [
        f"{count:,} {what}"
        for count, what in (
            (manifest.skipped_empty, "empty"),
            (manifest.skipped_bad, "unreadable"),
            (manifest.skipped_other, "of other subsets"),
        )
        if count
    ]
    return (
        f"{prefix}_{manifest.key}_document.bin/.idx: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes per token"
        + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )


def _tasks(source: ChunkSource) -> Iterator[list[Chunk]]:
    """Chunks, small ones together."""
    task: list[Chunk] = []
    size = 0
    for chunk in source.chunks():
        task.append(chunk)
        size += len(chunk.content)
        if size >= _BYTES_PER_TASK:
            yield task
            task, size = [], 0
    if task:
        yield task


def _encode_all(
    tasks: Iterator[list[Chunk]],
    tokenizer: Tokenizer,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    workers: int,
) -> Iterator[EncodedChunk]:
    """`encode_chunks` of every task, in order."""
    if workers == 1:
        for task in tasks:
            yield encode_chunks(task, tokenizer, options)
        return
    # "spawn": a forked child would inherit locks that the tokenizer's threads or the progress bar may hold.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_files, options))
    try:
        in_flight = deque()
        for task in tasks:
            in_flight.append(executor.submit(_work, task))
            if len(in_flight) >= _TASKS_IN_FLIGHT_PER_WORKER * workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
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


def _work(task: list[Chunk]) -> EncodedChunk:
    return encode_chunks(task, *_worker_state)
