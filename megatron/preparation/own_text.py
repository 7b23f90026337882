"""The user's own text, for prepare_data.py NAME --from PATH."""

import hashlib
import math
from collections.abc import Sequence

from megatron.preparation.corpora import DocumentCorpus, first_training_texts, source_pieces
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, read_texts
from megatron.preparation.readers import FileCorpus
from megatron.utils.errors import UserError
from megatron.utils.progress import Progress, readable_size

# No document is longer than this share of the text, so that every split has several, even of a
# single book.
LARGEST_SHARE = 0.01
MIN_DOCUMENT_BYTES = 4000
# About 25,600 tokens for training, which `kerple init` requires.
ENOUGH_BYTES = 100_000
# Shares of the documents for training, validation and test.
SPLIT = "80,10,10"
# (bytes of text, vocabulary size): the size for texts below this number of bytes.
VOCAB_SIZES = ((1e6, 1024), (5e7, 4096), (float("inf"), 16384))

_VERSION = 1  # increase this when the documents change


class OwnText(DocumentCorpus):
    """All documents of input files, in memory, ordered by a hash of their contents.

    Training, validation and test are consecutive ranges in this order, so each is a random sample
    of the documents. Longer documents than `LARGEST_SHARE` of the text are divided, after blank
    lines if possible.

    Args:
        limit_mb: use only the first `limit_mb` MB of documents in this order; None: all.

    `documents` raises UserError if a file is damaged or unreadable, or there is no text.
    """

    def __init__(self, files: FileCorpus, options: DocumentOptions, limit_mb: float | None = None):
        self.files = files
        self._options = options
        self._limit = math.inf
        if limit_mb is not None:
            self._limit = limit_mb * 1e6

    def identity(self) -> str:
        limit = "" if self._limit == math.inf else f" {self._limit}"
        return hashlib.sha256(f"{_VERSION} {self.files.identity()}{limit}".encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        """A vocabulary size for the size of the text, whatever the format of its files."""
        size = min(sum(len(content) for _, content in self.documents), self._limit)
        return next(vocab_size for limit, vocab_size in VOCAB_SIZES if size < limit)

    def tokenizer_texts(self) -> list[str]:
        return first_training_texts(self.documents, SPLIT)

    def _read(self) -> list[tuple[str, bytes]]:
        # All texts are in memory, as their order depends on all of them.
        texts: list[bytes] = []
        rejected = SkippedDocuments()
        with Progress("reading", self.files.total_bytes, unit="MB") as display:
            size = 0
            for text in read_texts(self.files.chunks(), self._options, rejected):
                content = text.encode()
                size += len(content)
                if content.strip():
                    texts.append(content)
                else:
                    self.skipped_empty += 1
                display.update(self.files.bytes_read, readable_size(size), size / 1e6)
        self.skipped_bad = rejected.bad
        for line in rejected.lines():
            print(line)
        if self.skipped_empty:
            print(f"documents without text: {self.skipped_empty:,}, left out")
        used_size = min(size, self._limit)
        documents = _pieces(texts, max(MIN_DOCUMENT_BYTES, int(used_size * LARGEST_SHARE)))
        if not documents:
            raise UserError(
                f"there is no text in {', '.join(file.name for file in self.files.files[:3])}"
            )

        # In the order of their hashes, up to the limit.
        hashed = [(hashlib.sha256(text).hexdigest(), text) for text in documents]
        hashed.sort(key=lambda item: item[0])
        named, size_before = [], 0
        for item in hashed:
            if size_before < self._limit:
                named.append(item)
            size_before += len(item[1])
        if used_size < ENOUGH_BYTES:
            print(
                f"note: {readable_size(int(used_size))} of text in {len(named):,} documents is too "
                "little for training, validation and test: `kerple init` needs about "
                f"{readable_size(ENOUGH_BYTES)}"
            )
        return named


def _pieces(texts: Sequence[bytes], limit: int) -> list[bytes]:
    """Texts of more than `limit` bytes in pieces."""
    documents: list[bytes] = []
    divided = pieces = 0
    for text in texts:
        if len(text) <= limit:
            documents.append(text)
            continue
        parts = [part for _, part in source_pieces(text, limit)]
        divided += 1
        pieces += len(parts)
        documents += parts
    if divided:
        print(
            f"documents of more than {limit:,} bytes: {divided:,}, divided into {pieces:,} pieces"
        )
    return documents
