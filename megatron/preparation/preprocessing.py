"""Preprocesses text into `.bin/.idx`: one process reads, several tokenize, and one writes and
records its progress.

Results are written in the order of the input and a bounded number of chunks is in memory. So the
output does not depend on the number of workers, and memory use does not depend on the size of the
corpus. A killed run resumes from its journal.
"""

import copy
import glob
import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron.data.indexed_dataset import (
    Manifest,
    manifest_path,
    open_indexed_files,
    write_manifest,
)
from megatron.preparation.decompression import BLOCK
from megatron.preparation.documents import DocumentOptions, SkippedDocuments
from megatron.preparation.encoding import WorkItem, encode_in_order, special_lines, work_items
from megatron.preparation.indexed_writer import (
    IndexedWriter,
    WriterState,
    is_intact,
    is_resumable,
    publish,
)
from megatron.preparation.readers import START, ChunkSource, ReadPosition
from megatron.tokenizer.interface import Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError, visible
from megatron.utils.files import check_writable, read_file, write_atomically
from megatron.utils.processes import Lock
from megatron.utils.progress import Progress, readable_size

# A kill loses at most this much work. Each commit takes a fraction of a second.
COMMIT_INTERVAL_SECONDS = 10.0


def preprocess(
    source: ChunkSource,
    output_prefix: str | Path,
    tokenizer_files: TokenizerFiles,
    options: DocumentOptions,
    *,
    inputs: Sequence[str] = (),
    names: Sequence[str] | None = None,
    workers: int = 1,
    limit_mb: float | None = None,
) -> dict[str, Manifest]:
    """Tokenize `source` into `{output_prefix}_{key}_document.bin/.idx/.json` for every key in
    `options.keys`.

    The final names appear only after the files are complete and verified. The same input gives the
    same bytes for any number of workers. If a run ends early for any reason, a later run with the
    same arguments (`workers` may differ) resumes after the last committed document. If the input or
    the options have changed, it starts from the beginning.

    Args:
        inputs: names of the inputs, recorded in the manifest.
        names: one name per key, used in file names in place of the key.
        workers: number of tokenizing processes. With 1, everything runs in this process.
        limit_mb: stop after the block of input (usually 1 MB) with which the text of the first key
            reaches this size.

    Returns:
        the manifest written for each key.

    Raises:
        UserError: a file or document is unreadable (documents: unless options.skip_bad), there is
            no text, the disk is full, a worker was killed, or another process writes the same
            output.
        KeyboardInterrupt: with a message about what was saved.
    """
    # Missing tokenizer files fail here, not in a worker process.
    tokenizer = tokenizer_files.build()

    # Everything that determines the output. How to treat bad documents is checked separately, in
    # `_Job._resume`.
    settings: dict[str, object] = {
        "input": source.identity(),
        "tokenizer": tokenizer.fingerprint,
        "keys": list(options.keys),
        "subset": options.subset,
        "append_eod": options.append_eod,
        "ftfy": options.ftfy,
        "limit_mb": limit_mb,
        "reading": [3, BLOCK],
    }

    # A run that was killed while publishing only publishes.
    with Journal(output_prefix, settings) as journal:
        prefixes = [f"{output_prefix}_{name}_document" for name in names or options.keys]
        job = _Job(
            journal=journal,
            name=str(output_prefix),
            prefixes=prefixes,
            tokenizer=tokenizer,
            tokenizer_files=tokenizer_files,
            options=options,
            inputs=list(inputs),
            workers=workers,
            limit_mb=limit_mb,
        )
        if not job.state.manifests:
            job.encode(source)
        manifests = job.publish()

    # What the documents contained that the user may not expect.
    for line in job.state.rejected.lines():
        print(line)
    special: Counter[int] = Counter()
    for output in job.state.outputs:
        special.update(output.special)
    for line in special_lines(special, tokenizer):
        print(line)
    return manifests


def summary(prefix: str | Path, manifest: Manifest) -> str:
    """Return one line for the user about the dataset at `prefix`."""
    counts = {
        "empty": manifest.skipped_empty,
        "unreadable": manifest.skipped_bad,
        "of other subsets": manifest.skipped_other,
    }
    skipped = [f"{count:,} {reason}" for reason, count in counts.items() if count]
    text = f"{prefix}.bin/.idx: {manifest.documents:,} documents, {manifest.tokens:,} tokens"
    if manifest.text_bytes is not None:
        text += f", {manifest.text_bytes / manifest.tokens:.2f} bytes per token"
    if skipped:
        text += f"; skipped: {', '.join(skipped)}"
    return text


@dataclass
class OutputState:
    """State of the output files of one key."""

    writer: WriterState = field(default_factory=WriterState)
    text_bytes: int = 0
    empty: int = 0
    special: dict[int, int] = field(default_factory=dict)


@dataclass
class JournalState:
    """Everything needed to resume: the position in the source, and one output per key. There is one
    manifest per key once all files are complete and verified and only need to be renamed.
    """

    position: ReadPosition
    bytes_read: int
    outputs: list[OutputState]
    rejected: SkippedDocuments
    manifests: list[Manifest] = field(default_factory=list)


@dataclass
class JournalContent:
    """The JSON in the journal. `work` contains the settings of the run."""

    work: dict[str, Any]
    progress: JournalState


_JOURNAL = TypeAdapter(JournalContent)


class Journal:
    """The journal of one output, and the lock on that output. A context manager.

    `OUTPUT_PREFIX.progress.json` is replaced atomically, and only after everything it describes is
    on disk. Its first line is the SHA-256 of the rest, so that no edited or damaged journal is
    resumed.

    Args:
        settings: JSON values that determine the output. A journal with other settings is ignored.
    """

    def __init__(self, output_prefix: str | Path, settings: dict[str, object]):
        self._path = Path(f"{output_prefix}.progress.json")
        self._settings = settings
        self._lock = Lock(
            f"{output_prefix}.lock",
            f"another process is writing {output_prefix}; wait for it to finish, or choose another "
            "prefix",
        )

    def __enter__(self) -> "Journal":
        check_writable(self._path.parent, "output prefix")
        self._lock.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def load(self) -> JournalState | None:
        """Load the state of an earlier run. Returns None, after printing why, if there is none with
        these settings.
        """
        if not self.exists:
            return None
        try:
            checksum, _, content = read_file(self._path).partition(b"\n")
            if checksum.decode() != hashlib.sha256(content).hexdigest():
                raise ValueError("the checksum is wrong")
            stored = _JOURNAL.validate_json(content, strict=True)
        except (UserError, ValueError):
            print(f"{self._path}: journal ignored: damaged or edited; starting from the beginning")
            return None
        if stored.work == self._settings:
            return stored.progress
        changed = (
            ", ".join(key for key in self._settings if stored.work.get(key) != self._settings[key])
            or "version"
        )
        print(f"{self._path}: journal ignored: {changed} changed; starting from the beginning")
        return None

    def save(self, state: JournalState) -> None:
        content = json.dumps(asdict(JournalContent(self._settings, state))).encode()
        write_atomically(self._path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        # Left behind by a kill during `save`.
        for partial in self._path.parent.glob(f"{glob.escape(self._path.name)}.partial-*"):
            partial.unlink(missing_ok=True)


@dataclass
class _Job:
    """One call of `preprocess`. `state`: what this run or an earlier one has committed."""

    journal: Journal
    name: str
    prefixes: list[str]
    tokenizer: Tokenizer
    tokenizer_files: TokenizerFiles
    options: DocumentOptions
    inputs: list[str]
    workers: int
    limit_mb: float | None

    def __post_init__(self) -> None:
        outputs = [OutputState() for _ in self.prefixes]
        self.state = self._resume() or JournalState(START, 0, outputs, SkippedDocuments())

    def _resume(self) -> JournalState | None:
        """Load the state of an earlier run if its files still exist, and if it skipped nothing that
        is an error now.
        """
        state = self.journal.load()
        if state is None:
            return None
        if state.rejected.bad and not self.options.skip_bad:
            print(
                f"{self.name}: journal ignored: the earlier run skipped bad documents; starting "
                "from the beginning"
            )
            return None
        if state.manifests:
            # The run was killed while renaming its files. Finish that, unless the files no longer
            # exist.
            try:
                _publish(self.prefixes, state.manifests)
                for prefix in self.prefixes:
                    open_indexed_files(prefix)
            except UserError:
                return None
            return state
        # The sizes first: a file that is too short has no checksum to compare.
        intact = self._has_files_of(state)
        for prefix, output in zip(self.prefixes, state.outputs, strict=True):
            intact = intact and is_intact(prefix, self.tokenizer.vocab_size, output.writer)
        if not intact:
            print(
                f"{self.name}: journal ignored: its partial files are missing or damaged; starting "
                "from the beginning"
            )
            return None
        print(f"{self.name}: resuming after {state.outputs[0].writer.documents:,} documents")
        return state

    def _has_files_of(self, state: JournalState) -> bool:
        """Whether the partial files are long enough for everything committed in `state`."""
        for prefix, output in zip(self.prefixes, state.outputs, strict=True):
            if not is_resumable(prefix, self.tokenizer.vocab_size, output.writer):
                return False
        return True

    def encode(self, source: ChunkSource) -> None:
        """Tokenize the remaining input and finalize the outputs."""
        with ExitStack() as stack:
            writers = []
            for prefix, output in zip(self.prefixes, self.state.outputs, strict=True):
                writer = IndexedWriter(prefix, self.tokenizer.vocab_size, output.writer)
                writers.append(stack.enter_context(writer))
            if self.state.position == START:
                # The journal of an earlier run that is not resumed: its files are overwritten now.
                self.journal.remove()
            try:
                size = ""
                if source.total_bytes is not None:
                    size = f" of {readable_size(source.total_bytes)}"
                note = f"{self.name}: tokenizing input{size} with {self.tokenizer.name}"
                print(visible(note), file=sys.stderr, flush=True)
                with Progress(Path(self.name).name, source.total_bytes, unit="MB") as display:
                    self._write_documents(source, writers, display)
                self._finalize(writers, source)
            except (Exception, KeyboardInterrupt) as error:
                if not self.journal.exists:
                    raise
                for writer in writers:
                    writer.close()
                documents = self.state.outputs[0].writer.documents
                if not documents or not self._has_files_of(self.state):
                    raise
                saved = f"{documents:,} documents are saved; the same command resumes"
                if isinstance(error, KeyboardInterrupt):
                    raise KeyboardInterrupt(saved) from error
                if isinstance(error, UserError):
                    raise UserError(f"{error} ({saved})") from error
                raise

    def _write_documents(
        self, source: ChunkSource, writers: list[IndexedWriter], display: Progress
    ) -> None:
        # Counts ahead of `self.state`: an interruption may come between the outputs of two keys.
        current = copy.deepcopy(self.state)
        first_output = current.outputs[0]

        # State is committed at intervals.
        display.restart(current.bytes_read, first_output.text_bytes / 1e6)
        committed_at = time.monotonic()
        limit = math.inf
        if self.limit_mb is not None:
            limit = self.limit_mb * 1e6

        # An earlier run may have reached the limit without finishing.
        items: Iterator[WorkItem] = iter(())
        if first_output.text_bytes < limit:
            items = work_items(source, self.state.position)
        for item, encoded in encode_in_order(
            items, self.tokenizer, self.tokenizer_files, self.options, self.workers
        ):
            # Append to the outputs of all keys.
            for column, (writer, output) in enumerate(zip(writers, current.outputs, strict=True)):
                writer.add(encoded.tokens[column], encoded.lengths[column])
                output.text_bytes += encoded.text_bytes[column]
                output.empty += encoded.empty[column]
                output.special = dict(encoded.special[column] + Counter(output.special))
            current.rejected.add(encoded.skipped)
            current.position, current.bytes_read = item.position, item.bytes_read

            # Show progress.
            status = f"{writers[0].documents:,} documents, {writers[0].tokens:,} tokens"
            display.update(item.bytes_read, status, first_output.text_bytes / 1e6)

            # Commit, and stop at the limit.
            del encoded  # before the next item is tokenized
            if time.monotonic() - committed_at >= COMMIT_INTERVAL_SECONDS:
                self._commit(writers, current)
                committed_at = time.monotonic()
            if first_output.text_bytes >= limit:
                break

        # Explain an output without text.
        rejected = current.rejected
        others = rejected.other_subsets
        if writers[0].tokens == 0 and rejected.bad:
            reasons = f"{rejected.bad:,} documents are unreadable, {first_output.empty:,} are empty"
            if others:
                reasons += f", {sum(others.values()):,} are of other subsets"
            raise UserError(
                f"no text to write: {reasons}; the first unreadable one: {rejected.examples[0]}"
            )
        if writers[0].tokens == 0 and others:
            counts = sorted(others.items(), key=lambda item: -item[1])[:30]
            subsets = ", ".join(f"{name} ({count:,})" for name, count in counts)
            raise UserError(
                f"the input has no documents of subset {self.options.subset}; its subsets: "
                f"{subsets}"
            )

        # The source may have advanced further, over input without documents. At the limit, it was
        # not read at all.
        if source.position > current.position:
            current.position, current.bytes_read = source.position, source.bytes_read
        if self.journal.exists:
            self._commit(writers, current)
        else:
            self.state = current

    def _commit(self, writers: list[IndexedWriter], current: JournalState) -> None:
        """Sync the outputs to disk, then record the state in the journal."""
        for writer, output in zip(writers, current.outputs, strict=True):
            output.writer = writer.commit()
        self.state = copy.deepcopy(current)
        self.journal.save(self.state)

    def _finalize(self, writers: list[IndexedWriter], source: ChunkSource) -> None:
        """Verify all outputs and record their manifests in the journal."""
        manifests = []
        for key, writer, output in zip(self.options.keys, writers, self.state.outputs, strict=True):
            manifest = Manifest(
                **asdict(writer.finalize()),
                text_bytes=output.text_bytes,
                tokenizer=self.tokenizer.name,
                tokenizer_fingerprint=self.tokenizer.fingerprint,
                vocab_size=self.tokenizer.vocab_size,
                append_eod=self.options.append_eod,
                ftfy=self.options.ftfy,
                key=key,
                inputs=self.inputs,
                skipped_empty=output.empty + source.skipped_empty,
                skipped_bad=self.state.rejected.bad + source.skipped_bad,
                skipped_other=sum(self.state.rejected.other_subsets.values()),
            )
            manifests.append(manifest)
        self.state.manifests = manifests
        self.journal.save(self.state)
        for writer in writers:
            writer.close()

    def publish(self) -> dict[str, Manifest]:
        """Give all files their final names. If this is killed, the next run completes it."""
        _publish(self.prefixes, self.state.manifests)
        self.journal.remove()
        return dict(zip(self.options.keys, self.state.manifests, strict=True))


def _publish(prefixes: Sequence[str], manifests: Sequence[Manifest]) -> None:
    """Give the files of each prefix their final names, with their manifest."""
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        manifest_path(prefix).unlink(missing_ok=True)  # it may describe files that are now replaced
        publish(prefix)
        write_manifest(prefix, manifest)
