"""Samples of one part of one corpus by megatron-core's GPTDataset, and blends of several.

A sample is `sequence_length + 1` consecutive tokens of the corpus's documents, shuffled by seed and laid end to end.
For the first epoch these are exactly the samples of megatron-core's own dataset builder (tested). Two things differ:
the order never depends on how many samples a run asks for, so that a run can be made longer and resumed; and every
later epoch gives the same samples in an order of its own. Blends follow megatron-core's rule.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.utils import Split
from megatron.data.index_cache import build_once, cache_folder, on_rank_0
from megatron.data.indexed_format import IndexedFiles, bin_path
from megatron.data.manifest import largest_id
from megatron.data.remote_dataset import RemoteFiles, open_dataset
from megatron.data.selection import PARTS
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

_LARGEST_ID = "largest_id.json"


@dataclass(frozen=True)
class SampleSettings:
    """What all parts of a run share.

    Attributes:
        vocab_size, eod: of the tokenizer; ids from vocab_size on are refused.
        seed: decides the order of documents and samples; 0 <= seed < 2^32.
        cache_path: folder for the sample indices; None: beside each corpus.
        eod_mask_loss: loss_mask is 0 where the input token is `eod`.
    """

    vocab_size: int
    eod: int
    seed: int
    cache_path: str | None = None
    eod_mask_loss: bool = False


class CorpusPart(torch.utils.data.Dataset):
    """One part (train, valid or test) of one corpus, for as many epochs as its length takes.

    Attributes:
        name: prefix and part, for messages.
        samples_per_epoch: samples before the first repetition.
        order: identifies the sequence of samples: equal for runs that see equal samples in equal order.
    """

    def __init__(self, dataset: GPTDataset, name: str, samples: int | None, order: str, settings: SampleSettings):
        self.name = name
        self.order = order
        self.settings = settings
        self.samples_per_epoch = len(dataset)
        self._dataset = dataset
        self._samples = self.samples_per_epoch if samples is None else samples
        self._shuffled_epoch = 0
        self._shuffle = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens, labels: int64 [sequence_length]; loss_mask: float32 [sequence_length]."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples} in {self.name}")
        return self.sample(index)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Like indexing, without an end: sample `index` is in epoch `index // samples_per_epoch`."""
        epoch, position = divmod(int(index), self.samples_per_epoch)
        if epoch:
            if epoch != self._shuffled_epoch:
                generator = np.random.default_rng((self.settings.seed, epoch))
                self._shuffle = generator.permutation(self.samples_per_epoch)
                self._shuffled_epoch = epoch
            position = int(self._shuffle[position])
        return self._dataset[position]

    def source(self, index: int) -> str:
        """The corpus that sample `index` comes from, for messages."""
        return self.name


class BlendedParts(torch.utils.data.Dataset):
    """Several parts, drawn from in proportion to their weights, each in its own order.

    Sample `i` comes from the part that is furthest behind its share, so the sequence of samples does not depend on the
    blend's length. Attributes and methods as of CorpusPart.
    """

    def __init__(self, parts: Sequence[CorpusPart], weights: Sequence[float], samples: int):
        shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)
        self.order = digest([[part.order for part in parts], shares.tolist()])
        self.settings = parts[0].settings
        self._part = np.zeros(samples, dtype=np.int16)
        self._position = np.zeros(samples, dtype=np.int64)
        build_blending_indices(self._part, self._position, shares, len(parts), samples, False)

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.parts[self._part[index]].sample(self._position[index])

    def source(self, index: int) -> str:
        return self.parts[self._part[index]].name


def build_corpus_part(
    files: IndexedFiles,
    span: tuple[int, int],
    part: int,
    sequence_length: int,
    samples: int | None,
    settings: SampleSettings,
) -> CorpusPart:
    """The samples of sequences `span[0]` to `span[1]`. Every rank must call this; rank 0 builds the indices.

    Args:
        part: index into PARTS.
        samples: length of the dataset; None: one epoch.

    Raises:
        UserError: fewer tokens than one sample, an id beyond the vocabulary, a cache folder that cannot be written.
    """
    first, last = span
    name = f"{files.prefix} ({PARTS[part]})"
    tokens = int(files.lengths[first:last].sum(dtype=np.int64))
    if tokens < sequence_length + 1:
        raise UserError(
            f"{name} has {tokens:,} tokens in {last - first:,} documents, fewer than one sample of "
            f"{sequence_length:,} + 1: use more data, another split, or a smaller seq-length"
        )

    def dataset(folder: Path) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=settings.seed,
            sequence_length=sequence_length,
            blend=([files.prefix], None),
            split="1",
            path_to_cache=str(folder),
            tokenizer=_Vocabulary(settings.vocab_size, settings.eod),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=settings.eod_mask_loss,
            create_attention_mask=False,
        )
        documents = np.arange(first, last, dtype=np.int32)
        # megatron-core names its index files by a digest that covers the path; a constant one lets a corpus be moved.
        return GPTDataset(open_dataset(files), "corpus", documents, None, Split(part), config)

    decisive = [first, last, part, sequence_length, settings.seed]
    folder = cache_folder(files, settings.cache_path, decisive)
    build_once(folder, dataset)
    # Of data on S3 it is not known without reading them all; the loader looks at every batch.
    known = not isinstance(files, RemoteFiles)
    largest = on_rank_0(lambda: _kept_largest_id(files, first, last, folder / _LARGEST_ID)) if known else -1
    if largest >= settings.vocab_size:
        raise UserError(
            f"{files.prefix}.bin holds token id {largest}, but the vocabulary ends at {settings.vocab_size - 1}: "
            "it was made with another tokenizer"
        )
    return CorpusPart(dataset(folder), name, samples, folder.name, settings)


def _kept_largest_id(files: IndexedFiles, first: int, last: int, path: Path) -> int:
    """`largest_id`, noted at `path` for as long as the .bin stays what it is: the indices outlive it where other tokens
    come in documents of the same lengths.
    """
    state = bin_path(files.prefix).stat()
    seen = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
    try:
        noted = json.loads(path.read_bytes())
        if noted["bin"] == seen:
            return noted["largest_id"]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    largest = largest_id(files, first, last)
    with contextlib.suppress(UserError):  # a folder of indices may be there to be read alone
        write_atomically(path, json.dumps({"largest_id": largest, "bin": seen}).encode())
    return largest


@dataclass(frozen=True)
class _Vocabulary:
    """The little of a tokenizer that GPTDataset looks at."""

    vocab_size: int
    eod: int

    @property
    def unique_identifiers(self) -> dict[str, int]:
        """megatron-core puts this into the names of its index files, which depend on no tokenizer."""
        return {}


def digest(values) -> str:
    """sha256 of JSON values, hexadecimal."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
