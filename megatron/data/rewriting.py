"""Datasets out of datasets: several merged into one, one split into parts by document."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron.data.indexed_format import IndexedFiles, check_indexed_files
from megatron.data.indexed_writer import IndexedWriter, WrittenFiles
from megatron.data.manifest import Manifest, manifest_path, read_manifest, write_manifest
from megatron.data.selection import PARTS, split_spans
from megatron.utils.errors import UserError

_TOKENS_AT_ONCE = 1 << 22


def merge(prefixes: Sequence[str], output: str) -> WrittenFiles:
    """The documents of all `prefixes`, in their order, as `output`.

    Raises:
        UserError: less than two datasets, the output among them, or datasets of different tokenizers.
    """
    if len(prefixes) < 2:
        raise UserError("merging takes at least two datasets")
    sources = [_open(prefix) for prefix in prefixes]
    _refuse_overwriting(prefixes, [output])
    known = [(prefix, manifest) for prefix, manifest in _manifests(sources) if manifest is not None]
    for prefix, manifest in known[1:]:
        first_prefix, first = known[0]
        if manifest.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise UserError(f"{prefix} was made with another tokenizer than {first_prefix}: its ids mean other tokens")
    wholes = [(source, 0, source.sequences) for source in sources]
    return _write(output, wholes, _joint_manifest([manifest for _, manifest in _manifests(sources)]))


def split(prefix: str, shares: str, output: str) -> dict[str, WrittenFiles]:
    """The parts of a split, cut exactly where training cuts them, as `{output}_train`, `_valid` and `_test`.

    Args:
        shares: as of the configuration's `split`, e.g. "969,30,1"; a part of share 0 is not written.

    Raises:
        UserError: a split that is none, a part without documents, the input among the outputs.
    """
    source = _open(prefix)
    spans = {part: span for part, span in zip(PARTS, split_spans(shares, source.sequences), strict=True) if span}
    for part, (first, last) in spans.items():
        if first == last:
            raise UserError(f"split {shares!r} of {prefix} ({source.sequences:,} documents) leaves nothing for {part}")
    _refuse_overwriting([prefix], [f"{output}_{part}" for part in spans])
    manifest = read_manifest(prefix)
    if manifest is not None:
        # How many bytes and rejected documents a part had is not known.
        manifest = _changed(manifest, text_bytes=None, skipped_empty=0, skipped_bad=0, skipped_other=0)
    return {part: _write(f"{output}_{part}", [(source, *span)], manifest) for part, span in spans.items()}


def _open(prefix: str) -> IndexedFiles:
    files = check_indexed_files(prefix)
    if not np.array_equal(files.document_index, np.arange(files.sequences + 1)):
        raise UserError(f"{prefix} has documents of several sequences; only one sequence per document is supported")
    return files


def _refuse_overwriting(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    present = {Path(f"{prefix}.bin").resolve() for prefix in inputs}
    for output in outputs:
        if Path(f"{output}.bin").resolve() in present:
            raise UserError(f"{output} is one of the inputs; choose another output")


def _manifests(sources: Sequence[IndexedFiles]) -> list[tuple[str, Manifest | None]]:
    """Each with its prefix; one that tells of other files counts as none."""
    manifests = []
    for source in sources:
        manifest = read_manifest(source.prefix)
        fits = manifest is not None and (manifest.tokens, manifest.documents) == (source.tokens, source.documents)
        manifests.append((source.prefix, manifest if fits else None))
    return manifests


def _joint_manifest(manifests: Sequence[Manifest | None]) -> Manifest | None:
    """What is known of all together; None if there is one without a manifest."""
    if any(manifest is None for manifest in manifests):
        return None
    sizes = [manifest.text_bytes for manifest in manifests]
    return _changed(
        manifests[0],
        text_bytes=None if None in sizes else sum(sizes),
        append_eod=all(manifest.append_eod for manifest in manifests),
        ftfy=all(manifest.ftfy for manifest in manifests),
        inputs=[name for manifest in manifests for name in manifest.inputs],
        skipped_empty=sum(manifest.skipped_empty for manifest in manifests),
        skipped_bad=sum(manifest.skipped_bad for manifest in manifests),
        skipped_other=sum(manifest.skipped_other for manifest in manifests),
    )


def _changed(manifest: Manifest, **changes) -> Manifest:
    return Manifest(**{**vars(manifest), **changes})


def _write(output: str, pieces: Sequence[tuple[IndexedFiles, int, int]], manifest: Manifest | None) -> WrittenFiles:
    """Sequences first to last of each source, one after the other, with the manifest's counts made to fit."""
    vocab_size = manifest.vocab_size if manifest else _vocabulary_bound([source for source, _, _ in pieces])
    with IndexedWriter(output, vocab_size) as writer:
        for source, first, last in pieces:
            for tokens, lengths in _blocks(source, first, last):
                writer.add(tokens.astype(writer.dtype), lengths)
        manifest_path(output).unlink(missing_ok=True)
        written = writer.finish()
    if manifest is not None:
        changes = {"documents": written.documents, "tokens": written.tokens, "sha256": written.sha256}
        write_manifest(output, _changed(manifest, largest_id=written.largest_id, dtype=written.dtype, **changes))
    return written


def _vocabulary_bound(sources: Sequence[IndexedFiles]) -> int:
    """A vocabulary size, for data that do not tell theirs, that is stored in the same type."""
    wide = any(source.dtype.itemsize > 2 or source.dtype == np.int16 for source in sources)
    return np.iinfo(np.int32).max if wide else 65499


def _blocks(source: IndexedFiles, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and lengths of some whole documents at a time."""
    tokens, offsets = source.map_tokens(), source.offsets()
    while first < last:
        end = int(np.searchsorted(offsets, offsets[first] + _TOKENS_AT_ONCE, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield tokens[offsets[first] : offsets[end]], source.lengths[first:end]
        first = end
