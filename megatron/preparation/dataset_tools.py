"""Operations on `.bin/.idx` datasets, for tools/datasets: inspect and merge."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.data.indexed_dataset import (
    IndexedFiles,
    bin_path,
    check_tokenizer,
    manifest_path,
    open_indexed_files,
    read_manifest,
    write_manifest,
)
from megatron.preparation.indexed_writer import IndexedWriter, WrittenFiles
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.utils.errors import UserError, visible
from megatron.utils.progress import Progress

TOKEN_BLOCK = 1 << 22  # tokens in memory at a time
_DECODED_TOKENS = 1 << 20  # decoded to estimate bytes per token


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`.

    Attributes:
        length_quantiles: tokens per document at the 0th, 10th, 50th, 90th, 99th and 100th percentile.
        bytes_per_token: UTF-8 bytes of text per token, counting end-of-document tokens; None if unknown.
        text_from: where bytes_per_token comes from.
        checksum: "matches" the manifest, or "no manifest".
    """

    prefix: str
    documents: int
    tokens: int
    dtype: str
    megabytes: float
    smallest_id: int
    largest_id: int
    mean_length: float
    length_quantiles: dict[int, int]
    bytes_per_token: float | None
    text_from: str
    checksum: str
    sha256: str


def inspect(prefix: str, tokenizer: Tokenizer | None = None) -> tuple[Inspection, IndexedFiles]:
    """Read both files completely and check them.

    Args:
        tokenizer: to check the ids, and to estimate the bytes per token if there is no manifest.

    Raises UserError if the files are invalid, the .bin does not match the manifest, an id is outside the vocabulary, or
    the data were built with another tokenizer.
    """
    # Read the tokens once, for the checksum and the range of the ids.
    files = open_indexed_files(prefix)
    manifest = read_manifest(prefix)
    if tokenizer:
        check_tokenizer(prefix, tokenizer)
    digest = hashlib.sha256()
    smallest, largest = int(np.iinfo(np.int64).max), -1
    tokens = files.open_tokens()
    with _progress(f"reading {prefix}.bin", files.tokens) as display:
        for start in range(0, files.tokens, TOKEN_BLOCK):
            block = tokens[start : start + TOKEN_BLOCK]
            digest.update(block.data)
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
            display.update(start + len(block))

    # Compare them with the manifest and the vocabulary.
    sha256 = digest.hexdigest()
    if manifest and manifest.sha256 != sha256:
        raise UserError(
            f"{bin_path(prefix)} is not the file that {prefix}.json describes (its SHA-256 is {sha256}, not "
            f"{manifest.sha256}): it was damaged or replaced; rebuild it"
        )
    vocab_size = tokenizer.vocab_size if tokenizer else manifest.vocab_size if manifest else None
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        invalid = smallest if smallest < 0 else largest
        raise UserError(f"{bin_path(prefix)} contains token id {invalid}, outside of the vocabulary of {vocab_size}")

    # Bytes per token: exact if preprocessing counted them, else from a decoded part.
    lengths = np.asarray(files.lengths)
    bytes_per_token: float | None = None
    if manifest and manifest.text_bytes is not None:
        bytes_per_token, text_from = manifest.text_bytes / files.tokens, "counted by preprocessing"
    elif tokenizer:
        ids = tokens[:_DECODED_TOKENS]
        text = tokenizer.detokenize(ids[ids != tokenizer.eod].tolist())
        bytes_per_token = len(text.encode("utf-8")) / len(ids)
        text_from = f"decoded from the first {len(ids):,} tokens"
    else:
        text_from = "unknown: pass the tokenizer to decode a part"

    # The report. Quantiles are lengths of documents, not interpolated.
    quantiles = {}
    for percent in (0, 10, 50, 90, 99, 100):
        quantiles[percent] = int(np.quantile(lengths, percent / 100, method="inverted_cdf"))
    inspection = Inspection(
        prefix=str(prefix),
        documents=files.documents,
        tokens=files.tokens,
        dtype=files.dtype.name,
        megabytes=bin_path(prefix).stat().st_size / 1e6,
        smallest_id=smallest,
        largest_id=largest,
        mean_length=float(lengths.mean()),
        length_quantiles=quantiles,
        bytes_per_token=bytes_per_token,
        text_from=text_from,
        checksum="matches" if manifest else "no manifest",
        sha256=sha256,
    )
    return inspection, files


def decode_document(files: IndexedFiles, number: int, tokenizer: Tokenizer, max_tokens: int | None = None) -> str:
    """Return the text of a document, or of its first tokens. Raises UserError if there is no such document."""
    if not 0 <= number < files.sequences:
        raise UserError(
            f"document {number} of {files.prefix} does not exist; it has documents 0 to {files.sequences - 1:,}"
        )
    return tokenizer.detokenize(files.open_tokens(number, number + 1)[:max_tokens].tolist())


def merge(prefixes: Sequence[str], output: str) -> WrittenFiles:
    """Concatenate the documents of all `prefixes` as `output`.

    Raises UserError if there are fewer than two datasets, two are the same, the output is one of them, or their
    tokenizers differ.
    """
    if len(prefixes) < 2:
        raise UserError("merging needs at least two datasets")
    sources = [_open_documents(prefix) for prefix in prefixes]
    _check_distinct(prefixes, output)

    # The tokenizers of the sources with a manifest must be the same.
    known = []
    for prefix, source in zip(prefixes, sources, strict=True):
        manifest = read_manifest(prefix)
        if manifest is not None and manifest.describes(source):
            known.append((prefix, manifest))
    for prefix, manifest in known[1:]:
        if manifest.tokenizer_fingerprint != known[0][1].tokenizer_fingerprint:
            raise UserError(f"{prefix} and {known[0][0]} were built with different tokenizers")
    manifests = [manifest for _, manifest in known] if len(known) == len(sources) else []

    # An unknown vocabulary is one that is stored in a type that all sources fit into.
    if manifests:
        vocab_size = manifests[0].vocab_size
    else:
        wide = any(source.dtype.itemsize > 2 or source.dtype == np.int16 for source in sources)
        vocab_size = np.iinfo(np.int32).max if wide else 65499

    # Copy as many documents as fit into a block, but at least one.
    total = sum(source.tokens for source in sources)
    with IndexedWriter(output, vocab_size) as writer, _progress(f"writing {output}.bin", total) as display:
        for source in sources:
            tokens, offsets, first = source.open_tokens(), source.offsets(), 0
            while first < source.sequences:
                end = int(np.searchsorted(offsets, offsets[first] + TOKEN_BLOCK, side="right")) - 1
                end = max(end, first + 1)
                writer.add(tokens[offsets[first] : offsets[end]].astype(writer.dtype), source.lengths[first:end])
                first = end
                display.update(writer.tokens)
        manifest_path(output).unlink(missing_ok=True)
        written = writer.finish()

    # The manifest of the result, if all sources have one.
    if manifests:
        text_bytes = [manifest.text_bytes for manifest in manifests if manifest.text_bytes is not None]
        combined = replace(
            manifests[0],
            documents=written.documents,
            tokens=written.tokens,
            text_bytes=sum(text_bytes) if len(text_bytes) == len(manifests) else None,
            largest_id=written.largest_id,
            sha256=written.sha256,
            dtype=written.dtype,
            append_eod=all(manifest.append_eod for manifest in manifests),
            ftfy=all(manifest.ftfy for manifest in manifests),
            inputs=[name for manifest in manifests for name in manifest.inputs],
            skipped_empty=sum(manifest.skipped_empty for manifest in manifests),
            skipped_bad=sum(manifest.skipped_bad for manifest in manifests),
            skipped_other=sum(manifest.skipped_other for manifest in manifests),
        )
        write_manifest(output, combined)
    return written


def _open_documents(prefix: str) -> IndexedFiles:
    files = open_indexed_files(prefix)
    if not np.array_equal(files.document_index, np.arange(files.sequences + 1)):
        raise UserError(f"{prefix} has documents of several sequences; only one sequence per document is supported")
    return files


def _check_distinct(inputs: Sequence[str], output: str) -> None:
    input_paths: dict[Path, str] = {}
    for prefix in inputs:
        path = bin_path(prefix).resolve()
        if path in input_paths:
            first = input_paths[path]
            raise UserError(f"{prefix} is given twice" + ("" if first == prefix else f": it is also {first}"))
        input_paths[path] = prefix
    if bin_path(output).resolve() in input_paths:
        raise UserError(f"{output} is one of the inputs; choose another output")


def _progress(task: str, tokens: int) -> Progress:
    """A progress display. Also prints one line now, because the display shows nothing in the first seconds."""
    print(visible(f"{task}: {tokens:,} tokens"), file=sys.stderr, flush=True)
    return Progress(task, tokens, unit="tokens")
