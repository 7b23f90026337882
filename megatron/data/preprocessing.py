"""Text to `.bin/.idx`: one process reads, several tokenize, one writes, and notes how far it has come.

Chunks travel in order through a bounded window, so the output does not depend on the number of workers, and memory not
on the size of the corpus. A run that was killed is taken up where its journal says.
"""

import importlib.util
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron.data.chunks import START, ChunkSource
from megatron.data.documents import DocumentOptions, EncodedChunk
from megatron.data.indexed_format import check_indexed_files
from megatron.data.indexed_writer import IndexedWriter, is_resumable, put_in_place
from megatron.data.journal import Journal, OutputState, Progress, Rejected
from megatron.data.manifest import Manifest, manifest_path, write_manifest
from megatron.data.progress import CorpusProgress
from megatron.data.readers import BLOCK
from megatron.data.workers import TokenizerFiles, check_workers, encode_tasks, tasks
from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError

# What a kill can cost; bringing everything to the disk costs a fraction of a second each time.
_SECONDS_BETWEEN_COMMITS = 10.0


def preprocess(
    source: ChunkSource,
    output_prefix: str | Path,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    *,
    inputs: Sequence[str] = (),
    names: Sequence[str] | None = None,
    workers: int = 1,
    num_docs: int | None = None,
    log_interval: int = 100,
) -> dict[str, Manifest]:
    """Tokenize `source` into `{output_prefix}_{key}_document.bin/.idx/.json` for every key in `options.keys`.

    The files appear under these names only when whole and verified; the same input gives the same bytes for any number
    of workers. However a run ends before that, a later one with the same arguments (other `workers` are fine) goes on
    with what the first had brought to the disk. After a change of the input or the options it starts anew.

    Args:
        inputs: names of what is read, for the manifest.
        names: one per key, in place of the keys in the names of the files.
        workers: processes that tokenize; 1: this process does it all.
        num_docs: number of documents, if known, for the progress display.

    Returns:
        the manifest written for each key.

    Raises:
        UserError: an unreadable document (unless options.skip_bad) or file, no text at all, a full disk, a worker that
            was killed, another process at the same output.
        KeyboardInterrupt: its message says what was kept.
    """
    check_workers(workers)
    if options.ftfy and importlib.util.find_spec("ftfy") is None:
        raise UserError("--ftfy needs the package ftfy, which is not installed: pip install ftfy")
    tokenizer = tokenizer_files.build()
    with Journal(output_prefix, _work(source, tokenizer, options)) as journal:
        prefixes = [f"{output_prefix}_{name}_document" for name in names or options.keys]
        run = _Run(journal, str(output_prefix), prefixes, tokenizer, options, inputs)
        if not run.progress.manifests:
            display = CorpusProgress(Path(output_prefix).name, source.total_bytes, num_docs, log_interval)
            run.encode(source, tokenizer_files, workers, display)
        manifests = run.put_in_place()
    rejected = run.progress.rejected
    for problem in rejected.examples:
        print(f"left out: {problem}")
    if rejected.bad > len(rejected.examples):
        print(f"left out: {rejected.bad - len(rejected.examples):,} more")
    return manifests


def summary(prefix: str | Path, manifest: Manifest) -> str:
    """One line for the user on what was written at `prefix`."""
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
        f"{prefix}.bin/.idx: {manifest.documents:,} documents, {manifest.tokens:,} tokens, "
        f"{manifest.text_bytes / manifest.tokens:.2f} bytes per token"
        + (f"; left out: {', '.join(left_out)}" if left_out else "")
    )


def _work(source: ChunkSource, tokenizer: Tokenizer, options: DocumentOptions) -> dict:
    """Whatever decides the output. Not here: what to do about bad documents (see `_Run._earlier_progress`)."""
    return {
        "input": source.identity(),
        "tokenizer": tokenizer.fingerprint,
        "keys": list(options.keys),
        "subset": options.subset,
        "append_eod": options.append_eod,
        "ftfy": options.ftfy,
        "reading": [1, BLOCK],
    }


class _Run:
    """One run of `preprocess`: the state of all outputs, from the journal or new."""

    def __init__(
        self,
        journal: Journal,
        name: str,
        prefixes: Sequence[str],
        tokenizer: Tokenizer,
        options: DocumentOptions,
        inputs: Sequence[str],
    ):
        self.journal = journal
        self.tokenizer = tokenizer
        self.options = options
        self.inputs = list(inputs)
        self.name = name
        self.prefixes = list(prefixes)
        self.progress = self._earlier_progress() or Progress(
            START, 0, [OutputState() for _ in self.prefixes], Rejected()
        )

    def _earlier_progress(self) -> Progress | None:
        progress = self.journal.load()
        if progress is None:
            return None
        if progress.manifests:
            return progress if self._are_whole(progress.manifests) else None
        if progress.rejected.bad and not self.options.skip_bad:
            print(f"{self.name}: an unfinished run had left out bad documents; starting anew")
            return None
        states = zip(self.prefixes, progress.outputs, strict=True)
        if not all(is_resumable(prefix, self.tokenizer.vocab_size, output.writer) for prefix, output in states):
            print(f"{self.name}: the files of an unfinished run are gone; starting anew")
            return None
        print(f"{self.name}: going on behind the {progress.outputs[0].writer.documents:,} documents that are done")
        return progress

    def _are_whole(self, manifests: list[Manifest]) -> bool:
        """Finish the renaming that a kill interrupted; False if the files are not there any more."""
        try:
            for prefix, manifest in zip(self.prefixes, manifests, strict=True):
                put_in_place(prefix)
                found = check_indexed_files(prefix)
                if (found.documents, found.tokens) != (manifest.documents, manifest.tokens):
                    return False
        except UserError:
            return False
        return True

    def encode(
        self, source: ChunkSource, tokenizer_files: TokenizerFiles, workers: int, display: CorpusProgress
    ) -> None:
        """Tokenize what is left, and seal the outputs."""
        with ExitStack() as stack:
            writers = [
                stack.enter_context(IndexedWriter(prefix, self.tokenizer.vocab_size, output.writer))
                for prefix, output in zip(self.prefixes, self.progress.outputs, strict=True)
            ]
            if self.progress.position == START:
                self.journal.remove()  # of other work; its files are overwritten from here on
            try:
                with display:
                    self._encode(source, tokenizer_files, workers, writers, display)
                self._seal(writers)
            except (Exception, KeyboardInterrupt) as error:
                if not self.journal.exists:
                    raise
                for writer in writers:
                    writer.suspend()
                documents = self.progress.outputs[0].writer.documents
                kept = f"{documents:,} documents are kept, the same command goes on from there"
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(kept) from error
                if isinstance(error, UserError):
                    raise UserError(f"{error} ({kept})") from error
                raise

    def _encode(
        self,
        source: ChunkSource,
        tokenizer_files: TokenizerFiles,
        workers: int,
        writers: list[IndexedWriter],
        display: CorpusProgress,
    ) -> None:
        # What is committed is a copy: an interruption between two outputs must not be noted.
        outputs = [OutputState(output.writer, output.text_bytes, output.empty) for output in self.progress.outputs]
        rejected = self.progress.rejected.copy()
        display.start(self.progress.bytes_read, outputs[0].text_bytes)
        committed_at = time.monotonic()
        todo = tasks(source, self.progress.position)
        for task, encoded in encode_tasks(todo, self.tokenizer, tokenizer_files, self.options, workers):
            for column, (writer, output) in enumerate(zip(writers, outputs, strict=True)):
                _add(writer, output, encoded, column)
            rejected.add(encoded)
            display.update(task.bytes_read, writers[0].documents, writers[0].tokens, outputs[0].text_bytes)
            if time.monotonic() - committed_at >= _SECONDS_BETWEEN_COMMITS:
                self._commit(writers, Progress(task.position, task.bytes_read, outputs, rejected))
                committed_at = time.monotonic()
        _check_found(writers[0].tokens, rejected, self.options)
        end = Progress(source.position, source.bytes_read, outputs, rejected)
        if self.journal.exists:
            self._commit(writers, end)
        else:
            self.progress = end

    def _commit(self, writers: list[IndexedWriter], progress: Progress) -> None:
        """Bring everything to the disk, then note it."""
        outputs = [
            OutputState(writer.commit(), output.text_bytes, output.empty)
            for writer, output in zip(writers, progress.outputs, strict=True)
        ]
        self.progress = Progress(progress.position, progress.bytes_read, outputs, progress.rejected.copy())
        self.journal.save(self.progress)

    def _seal(self, writers: list[IndexedWriter]) -> None:
        """Verify all outputs and note that they are whole."""
        manifests = []
        for key, writer, output in zip(self.options.keys, writers, self.progress.outputs, strict=True):
            written = writer.seal()
            manifests.append(
                Manifest(
                    documents=written.documents,
                    tokens=written.tokens,
                    text_bytes=output.text_bytes,
                    largest_id=written.largest_id,
                    sha256=written.sha256,
                    dtype=written.dtype,
                    tokenizer=self.tokenizer.name,
                    tokenizer_fingerprint=self.tokenizer.fingerprint,
                    vocab_size=self.tokenizer.vocab_size,
                    append_eod=self.options.append_eod,
                    ftfy=self.options.ftfy,
                    key=key,
                    inputs=self.inputs,
                    skipped_empty=output.empty,
                    skipped_bad=self.progress.rejected.bad,
                    skipped_other=sum(self.progress.rejected.other_subsets.values()),
                )
            )
        self.progress.manifests = manifests
        self.journal.save(self.progress)
        for writer in writers:
            writer.suspend()

    def put_in_place(self) -> dict[str, Manifest]:
        """Give all files their names. A run killed in here is finished by the next one."""
        for prefix, manifest in zip(self.prefixes, self.progress.manifests, strict=True):
            manifest_path(prefix).unlink(missing_ok=True)  # it tells of files that are now replaced
            put_in_place(prefix)
            write_manifest(prefix, manifest)
        self.journal.remove()
        return dict(zip(self.options.keys, self.progress.manifests, strict=True))


def _add(writer: IndexedWriter, output: OutputState, encoded: EncodedChunk, column: int) -> None:
    writer.add(encoded.tokens[column], encoded.lengths[column])
    output.text_bytes += encoded.text_bytes[column]
    output.empty += encoded.empty[column]


def _check_found(tokens: int, rejected: Rejected, options: DocumentOptions) -> None:
    """Say it if there is no text because all of it belonged to other subsets."""
    if tokens == 0 and rejected.other_subsets:
        largest = sorted(rejected.other_subsets.items(), key=lambda item: -item[1])[:30]
        found = ", ".join(f"{name} ({count:,})" for name, count in largest)
        raise UserError(f"the input has no documents of subset {options.subset}; its subsets: {found}")
