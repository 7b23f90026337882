"""Merging `.bin/.idx` datasets, for tools/datasets/merge_datasets.py."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import (
    IndexedFiles,
    Manifest,
    bin_path,
    changed_file_error,
    manifest_path,
    merged_datasets,
    open_indexed_files,
    write_manifest,
)
from megatron.preparation.indexed_writer import IndexedWriter, WrittenFiles
from megatron.utils.errors import UserError

DOCUMENTS = 100  # in memory at a time


def merge(prefixes: Sequence[str], output: str) -> WrittenFiles:
    """Concatenate the documents of all `prefixes` as `output`.

    Raises UserError if there are fewer than two datasets, two are the same, the output is one of
    them, their tokenizers differ, or the tokens of one are not those that its manifest describes.
    """
    if len(prefixes) < 2:
        raise UserError("merging needs at least two datasets")
    sources = [_open_documents(prefix) for prefix in prefixes]
    paths = [bin_path(prefix).resolve() for prefix in prefixes]
    for number, prefix in enumerate(prefixes):
        if paths[number] in paths[:number]:
            raise UserError(f"{prefix} is given twice")
    if bin_path(output).resolve() in paths:
        raise UserError(f"{output} is one of the inputs; choose another output")

    # The vocabulary. If it is unknown, it is one that is stored in a type that all sources fit
    # into.
    manifests = _manifests(sources)
    has_manifests = len(manifests) == len(sources)
    vocab_size = np.iinfo(np.int32).max
    if has_manifests:
        vocab_size = manifests[0].vocab_size
    elif all(source.dtype in (np.uint8, np.uint16) for source in sources):
        vocab_size = 65499

    # The documents.
    with IndexedWriter(output, vocab_size) as writer:
        for source in sources:
            tokens, offsets, digest = source.open_tokens(), source.offsets(), hashlib.sha256()
            for first in range(0, source.sequences, DOCUMENTS):
                lengths = source.lengths[first : first + DOCUMENTS]
                content = tokens[offsets[first] : offsets[first + len(lengths)]]
                digest.update(content.data)
                largest = int(content.max(initial=0))
                if largest >= vocab_size:
                    raise UserError(
                        f"{source.prefix}.bin has token id {largest}, but the largest id that the "
                        f"merged dataset can have is {vocab_size - 1}"
                    )
                writer.add(content.astype(writer.dtype), lengths)

            # The manifest of the result would hide damage of a source.
            if source.manifest is not None and source.manifest.sha256 != digest.hexdigest():
                raise changed_file_error(bin_path(source.prefix), source.prefix)
        manifest_path(output).unlink(missing_ok=True)
        written = writer.finish()

    # The manifest of the result, if all sources have one.
    if has_manifests:
        text_bytes: int | None = 0
        for manifest in manifests:
            if text_bytes is None or manifest.text_bytes is None:
                text_bytes = None
            else:
                text_bytes += manifest.text_bytes
        combined = replace(
            manifests[0],
            **asdict(written),
            text_bytes=text_bytes,
            append_eod=all(manifest.append_eod for manifest in manifests),
            ftfy=all(manifest.ftfy for manifest in manifests),
            inputs=[name for manifest in manifests for name in manifest.inputs],
            skipped_empty=sum(manifest.skipped_empty for manifest in manifests),
            skipped_bad=sum(manifest.skipped_bad for manifest in manifests),
            skipped_other=sum(manifest.skipped_other for manifest in manifests),
            parts=[part for source in sources for part in merged_datasets(source)],
        )
        write_manifest(output, combined)
    return written


def _open_documents(prefix: str) -> IndexedFiles:
    files = open_indexed_files(Path(prefix).absolute())
    if not np.array_equal(files.document_index, np.arange(files.sequences + 1)):
        raise UserError(
            f"{prefix} has documents of several sequences; only one sequence per document is "
            "supported"
        )
    return files


def _manifests(sources: Sequence[IndexedFiles]) -> list[Manifest]:
    """The manifests of the sources that have one. Raises UserError if their tokenizers differ."""
    manifests: list[Manifest] = []
    first = ""
    for source in sources:
        manifest = source.manifest
        if manifest is None:
            continue
        first = first or source.prefix
        manifests.append(manifest)
        if manifest.tokenizer_fingerprint != manifests[0].tokenizer_fingerprint:
            raise UserError(f"{source.prefix} and {first} were built with different tokenizers")
    return manifests
