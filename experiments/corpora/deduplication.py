"""Finds exact and near-duplicate documents with MinHash (Broder, 1997) and locality-sensitive
hashing.

The similarity of two documents is the Jaccard index of their sets of shingles: five consecutive
words or punctuation characters, as in Lee et al., "Deduplicating Training Data Makes Language
Models Better" (2022). The package datasketch computes the signatures and finds candidates.
"""

import hashlib
import re
import zlib

import datasketch
import numpy as np

THRESHOLD = 0.7
SHINGLE_WORDS = 5

_PERMUTATIONS = 128
# 32 bands of 4 rows: a pair of similarity s becomes a candidate with probability 1 - (1 - s^4)^32,
# which is 0.88 for s = 0.5 and 0.9998 for s = 0.7. Candidates are then compared by their
# signatures.
_BANDS, _ROWS = 32, 4

# Bytes, not characters: the result must not depend on the Unicode version of Python.
_WORD = re.compile(rb"[0-9A-Za-z_\x80-\xff]+|[^\s0-9A-Za-z_\x80-\xff]")


class Deduplicator:
    """Checks one document at a time, and keeps it unless it resembles a document that was kept
    earlier.

    So no two kept documents are near-duplicates of each other, up to the error of the estimated
    similarity s: its standard error is sqrt(s (1 - s) / 128), which is 0.04 at s = 0.7. Memory use
    is about 10 kB per kept document.
    """

    def __init__(self) -> None:
        self._documents = self._exact = self._near = 0  # checked, and removed as duplicates
        # The result depends on the scheme, and datasketch 1 used another one.
        self._empty = datasketch.MinHash(_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")
        self._index = datasketch.MinHashLSH(num_perm=_PERMUTATIONS, params=(_BANDS, _ROWS))
        self._hashes: set[bytes] = set()
        self._signatures: list[np.ndarray] = []

    def __str__(self) -> str:
        """The numbers of documents that were checked, removed and kept."""
        return (
            f"{self._documents:,} documents: {self._exact:,} exact duplicates and {self._near:,} "
            f"near-duplicates removed, {self._documents - self._exact - self._near:,} kept"
        )

    def is_new(self, content: bytes) -> bool:
        """Return whether to keep this document, and count it."""
        # The same content.
        self._documents += 1
        content_hash = hashlib.sha256(content).digest()
        if content_hash in self._hashes:
            self._exact += 1
            return False
        self._hashes.add(content_hash)

        # Similar content: the index finds candidates, whose signatures are compared.
        signature = self._empty.copy()
        signature.update_batch(shingle_hashes(content).tolist())
        for candidate in self._index.query(signature):
            if np.mean(self._signatures[candidate] == signature.hashvalues) >= THRESHOLD:
                self._near += 1
                return False
        self._index.insert(len(self._signatures), signature, check_duplication=False)
        self._signatures.append(signature.hashvalues)
        return True


def shingle_hashes(content: bytes) -> np.ndarray:
    """Return a 32-bit hash of every distinct shingle (uint64, sorted). A document with fewer words
    is one shingle.
    """
    words = np.fromiter(map(zlib.crc32, _WORD.findall(content)), dtype=np.uint64)
    count = max(len(words) - SHINGLE_WORDS + 1, 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(min(SHINGLE_WORDS, len(words))):
        # A polynomial in an odd constant, modulo 2^64 (Knuth's multiplicative hashing: the high
        # bits are well mixed).
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[offset : offset + count]
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    return np.unique(hashes >> np.uint64(32))
