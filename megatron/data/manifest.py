"""`PREFIX.json`, written beside a `.bin/.idx` pair: what it was made from, and counts that cost a pass to find out."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron.data.indexed_format import IndexedFiles, bin_path
from megatron.utils.files import write_atomically

_BLOCK = 1 << 22  # tokens looked at in one go


@dataclass(frozen=True)
class Manifest:
    """How a `.bin/.idx` pair was made.

    Attributes:
        text_bytes: UTF-8 bytes of the text that became tokens (for bits per byte); None: not known.
        largest_id: largest token id in the .bin.
        sha256: of the .bin, hexadecimal.
        tokenizer: its `tokenizer-type`, and tokenizer_fingerprint its files' digest.
        skipped_empty, skipped_bad, skipped_other: documents left out: without text; unreadable; of another subset.
    """

    documents: int
    tokens: int
    text_bytes: int | None
    largest_id: int
    sha256: str
    dtype: str
    tokenizer: str
    tokenizer_fingerprint: str
    vocab_size: int
    append_eod: bool
    ftfy: bool
    key: str
    inputs: list[str]
    skipped_empty: int
    skipped_bad: int
    skipped_other: int


def manifest_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.json")


def write_manifest(prefix: str | Path, manifest: Manifest) -> None:
    write_atomically(manifest_path(prefix), (json.dumps(asdict(manifest), indent=2) + "\n").encode())


def read_manifest(prefix: str | Path) -> Manifest | None:
    """The manifest beside `prefix`, or None if there is none that can be read: data made elsewhere has none."""
    try:
        return Manifest(**json.loads(manifest_path(prefix).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def largest_id(files: IndexedFiles, first: int, last: int) -> int:
    """A bound on the ids in sequences `first` to `last`: the manifest's figure, or else the largest id found there.

    A manifest that is older than the .bin is of an earlier one, which other software has replaced.
    """
    manifest = read_manifest(files.prefix)
    if manifest is not None and (manifest.tokens, manifest.documents) == (files.tokens, files.documents):
        written, described = (path(files.prefix).stat().st_mtime_ns for path in (bin_path, manifest_path))
        if described >= written:
            return manifest.largest_id
    tokens, offsets = files.map_tokens(), files.offsets()
    largest = -1
    for start in range(int(offsets[first]), int(offsets[last]), _BLOCK):
        block = np.asarray(tokens[start : min(start + _BLOCK, int(offsets[last]))])
        if int(block.min()) < 0:
            # As unsigned, a negative id is beyond every vocabulary.
            return int(block.min()) & (2 ** (8 * block.itemsize) - 1)
        largest = max(largest, int(block.max()))
    return largest
