"""What tells one checkpoint's weights from another's, wherever the folder lies."""

import hashlib
from pathlib import Path

from megatron.checkpoint.layers import layer_files
from megatron.checkpoint.manifest import read_manifest


def weights_fingerprint(step: Path) -> str:
    """16 hexadecimal digits of the layer files: of their sizes and checksums in the manifest, or, without one, of their
    contents. Raises CheckpointError where files are missing or cannot be read.
    """
    digest = hashlib.sha256()
    records = read_manifest(step)
    for paths in layer_files(step).values():
        for path in paths:
            if records is not None and path.name in records:
                record = records[path.name]
                digest.update(f"{path.name} {record.size} {record.crc32}\n".encode())
                continue
            with open(path, "rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
