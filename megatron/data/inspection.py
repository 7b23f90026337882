"""A look into a `.bin/.idx` pair: whether it is whole, how much it holds, how long its documents are."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_format import IndexedFiles, bin_path, check_indexed_files
from megatron.data.manifest import Manifest, read_manifest
from megatron.tokenizer import Tokenizer
from megatron.utils.errors import UserError

_BLOCK = 1 << 22  # tokens looked at in one go
_DECODED_FOR_RATE = 1 << 20  # tokens, when bytes per token are to be found by decoding


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        length_quantiles: tokens of the documents at 0, 10, 50, 90, 99 and 100 percent of them.
        bytes_per_token: UTF-8 bytes of text per token (end-of-document tokens count as tokens); None: not known.
        checksum: "matches" the manifest's, or "no manifest": whether the .bin is what was written.
        text_from: where bytes_per_token comes from.
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
    """Read both files to the end.

    Args:
        tokenizer: to check the ids against, and to find the bytes per token where no manifest tells.

    Raises:
        UserError: files that do not belong together, a .bin that is not the one its manifest tells of, an id beyond
            the vocabulary, a tokenizer that the data were not made with.
    """
    files = check_indexed_files(prefix)
    manifest = read_manifest(prefix)
    if manifest and tokenizer and manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        raise UserError(f"{prefix} was made with another {manifest.tokenizer} than the one given")
    smallest, largest, sha256 = _pass_over(files)
    if manifest and manifest.sha256 != sha256:
        raise UserError(
            f"{bin_path(prefix)} is not the file that {prefix}.json tells of (its SHA-256 is {sha256}, not "
            f"{manifest.sha256}): it was damaged or replaced; make it again"
        )
    vocab_size = tokenizer.vocab_size if tokenizer else manifest.vocab_size if manifest else None
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        wrong = smallest if smallest < 0 else largest
        raise UserError(f"{bin_path(prefix)} holds token id {wrong}, outside of the vocabulary of {vocab_size or '?'}")
    lengths = np.asarray(files.lengths)
    rate, origin = _bytes_per_token(files, manifest, tokenizer)
    found = Inspection(
        prefix=str(prefix),
        documents=files.documents,
        tokens=files.tokens,
        dtype=files.dtype.name,
        megabytes=bin_path(prefix).stat().st_size / 1e6,
        smallest_id=smallest,
        largest_id=largest,
        mean_length=float(lengths.mean()),
        length_quantiles={
            percent: int(np.quantile(lengths, percent / 100, method="inverted_cdf"))
            for percent in (0, 10, 50, 90, 99, 100)
        },
        bytes_per_token=rate,
        text_from=origin,
        checksum="matches" if manifest else "no manifest",
        sha256=sha256,
    )
    return found, files


def decode_document(files: IndexedFiles, number: int, tokenizer: Tokenizer, max_tokens: int | None = None) -> str:
    """The text of one document, or of its first tokens. Raises UserError if there is no such document."""
    if not 0 <= number < files.sequences:
        raise UserError(f"document {number} of {files.prefix} does not exist; it has {files.sequences:,}, from 0")
    offsets = files.offsets()
    ids = files.map_tokens()[offsets[number] : offsets[number + 1]]
    return tokenizer.detokenize(ids[:max_tokens].tolist())


def draw_lengths(files: IndexedFiles, path: Path) -> None:
    """A histogram of the documents' lengths, both axes logarithmic, as a picture (format by the name's ending).

    Beside the documents it counts the tokens in them: most documents of a corpus are short, most tokens in long ones.
    Raises UserError where the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = np.asarray(files.lengths, dtype=np.int64)
    edges = np.unique(np.geomspace(1, max(int(lengths.max()), 2) + 1, 60).round().astype(np.int64))
    documents, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.stairs(documents, edges, label="documents", color="tab:blue", fill=True, alpha=0.4)
    axes.stairs(tokens, edges, label="tokens in them", color="tab:orange")
    axes.set(xscale="log", yscale="log", xlabel="tokens in a document", ylabel="count", title=Path(files.prefix).name)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:  # the former for an ending that is no format
        raise UserError(f"cannot draw {path}: {getattr(error, 'strerror', None) or error}") from error


def _pass_over(files: IndexedFiles) -> tuple[int, int, str]:
    """Smallest and largest id, and the SHA-256 of the .bin."""
    digest = hashlib.sha256()
    smallest, largest = np.iinfo(np.int64).max, -1
    tokens = files.map_tokens()
    for start in range(0, files.tokens, _BLOCK):
        block = np.asarray(tokens[start : start + _BLOCK])
        digest.update(block)
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return smallest, largest, digest.hexdigest()


def _bytes_per_token(
    files: IndexedFiles, manifest: Manifest | None, tokenizer: Tokenizer | None
) -> tuple[float | None, str]:
    if manifest and manifest.text_bytes is not None:
        return manifest.text_bytes / files.tokens, "counted when it was made"
    if tokenizer is None:
        return None, "not known: give the tokenizer to decode a part"
    ids = np.asarray(files.map_tokens()[:_DECODED_FOR_RATE])
    text = tokenizer.detokenize(ids[ids != tokenizer.eod].tolist())
    return len(text.encode("utf-8")) / len(ids), f"decoding the first {len(ids):,} tokens"
