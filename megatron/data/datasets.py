"""Training, validation and test datasets: megatron-core's GPTDataset on parts of corpora, and
blends of several.

A sample is `sequence_length + 1` consecutive tokens of the concatenated documents, which are
shuffled by seed. The first epoch has exactly the samples of megatron-core's own dataset builder
(tested). There are two differences. The order does not depend on the number of samples, so a run
can be extended and resumed. And each further epoch has the same samples in a new order. Blends
follow megatron-core's rule.
"""

import functools
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron.config import Config
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.helpers import build_blending_indices
from megatron.core.datasets.utils import Split
from megatron.data.index_cache import INDICES, FileDataset, build_once, cache_folder
from megatron.data.indexed_dataset import (
    IndexedFiles,
    check_tokenizer,
    data_fingerprint,
    open_indexed_files,
)
from megatron.data.splits import PARTS, Blend, config_blends, dataset_prefixes, split_spans
from megatron.tokenizer.interface import Tokenizer
from megatron.utils.errors import UserError, first_line
from megatron.utils.ranks import agree, run_on_all_ranks

# Documents of each dataset whose last token is read, if a key depends on it.
_CHECKED_DOCUMENTS = 256


@dataclass(frozen=True)
class SampleSettings:
    """Settings that all datasets of a run share.

    Attributes:
        vocab_size, eod: of the tokenizer. `Loader` rejects ids of `vocab_size` and above.
        seed: determines the order of documents and samples; 0 <= seed < 2^32.
        cache_path: folder for the sample indices; None stores them next to each corpus.
        eod_mask_loss: set the loss mask to 0 where the input token is `eod`.
        reset_attention_mask: batches contain document ids.
    """

    vocab_size: int
    eod: int
    seed: int
    cache_path: str | None = None
    eod_mask_loss: bool = False
    reset_attention_mask: bool = False


class CorpusPart(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The samples of one part (train, valid or test) of a corpus, repeated for as many epochs as
    needed.

    Attributes:
        name: prefix and part, for messages.
        documents, tokens: of the part.
        samples_per_epoch: number of samples before the first repetition.
        order: identifies the samples and their order: equal for runs that see the same ones.
    """

    def __init__(
        self,
        dataset: GPTDataset,
        name: str,
        size: tuple[int, int],
        samples: int | None,
        order: str,
        settings: SampleSettings,
    ):
        self.name = name
        self.documents, self.tokens = size
        self.order = order
        self.settings = settings
        self.samples_per_epoch = len(dataset)
        self._dataset = dataset

        # Without a number of samples, one epoch.
        self._samples = len(dataset)
        if samples is not None:
            self._samples = samples
        self._shuffled_epoch = 0
        self._shuffle: np.ndarray | None = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Tokens and labels, int64 [sequence_length], and loss_mask, float32 [sequence_length]."""
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples} in {self.name}")
        return self.sample(index)

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        """Like indexing, but without an upper bound: sample `index` is in epoch
        `index // samples_per_epoch`.
        """
        # megatron-core shuffles the first epoch; every further one has its own order.
        epoch, position = divmod(int(index), self.samples_per_epoch)
        if epoch:
            if self._shuffle is None or epoch != self._shuffled_epoch:
                generator = np.random.default_rng((self.settings.seed, epoch))
                self._shuffle = generator.permutation(self.samples_per_epoch)
                self._shuffled_epoch = epoch
            position = int(self._shuffle[position])
        sample: dict[str, torch.Tensor] = self._dataset[position]
        return sample

    def describe(self, samples: int | None = None) -> list[str]:
        """A line about each corpus, of which a run reads `samples` samples (default: all)."""
        if samples is None:
            samples = len(self)
        return [
            f"{self.name}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.samples_per_epoch:,} samples; the run reads {samples:,} samples, "
            f"{samples / self.samples_per_epoch:.2f} epochs"
        ]

    def source(self, index: int) -> str:
        """Return the corpus that sample `index` comes from, for messages."""
        return self.name


class BlendedParts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples from several corpora in proportion to their weights, each corpus in its own order.

    Sample `i` comes from the corpus that is furthest behind its share, so the order does not depend
    on the length of the blend. `order`, `settings` and the methods are those of CorpusPart.
    """

    def __init__(self, parts: Sequence[CorpusPart], weights: Sequence[float], samples: int):
        # megatron-core assigns each sample a part, and a position in it.
        shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
        self.parts = parts
        order = json.dumps([[part.order for part in parts], shares.tolist()])
        self.order = hashlib.sha256(order.encode()).hexdigest()
        self.settings = parts[0].settings
        self._part = np.zeros(samples, dtype=np.int16)
        self._position = np.zeros(samples, dtype=np.int64)
        build_blending_indices(self._part, self._position, shares, len(parts), samples, False)

    def __len__(self) -> int:
        return len(self._part)

    def describe(self) -> list[str]:
        """A line about each corpus."""
        counts = np.bincount(self._part, minlength=len(self.parts)).tolist()
        lines = []
        for part, count in zip(self.parts, counts, strict=True):
            lines += part.describe(count)
        return lines

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.parts[int(self._part[index])].sample(int(self._position[index]))

    def source(self, index: int) -> str:
        return self.parts[int(self._part[index])].name


Samples = CorpusPart | BlendedParts


class Datasets(NamedTuple):
    """The datasets of a run. A dataset is None if it is not requested or its share of the split is
    0. The validation dataset is also None if it has no documents, the test dataset if it is smaller
    than one sample.
    """

    train: Samples | None
    valid: Samples | None
    test: Samples | None


def build_datasets(
    config: Config,
    tokenizer: Tokenizer,
    sequence_length: int,
    num_samples: Sequence[int | None],
    valid_sequence_length: int | None = None,
) -> Datasets:
    """Build the datasets that `config.data` names, in an order determined by
    `config.training.seed`.

    Every rank must call this: rank 0 builds the sample indices while the others wait, and all get
    the same datasets.

    Args:
        sequence_length: input tokens per sample; labels are the input shifted by one.
        num_samples: number of train, valid and test samples. None means one epoch, 0 none; may
            exceed an epoch.
        valid_sequence_length: `seq-length-val`, if validation and test samples have another length.

    Raises UserError if the data files are missing or invalid (see `open_indexed_files`), a dataset
    has fewer tokens than one sample, or the data were built with another tokenizer.
    """
    data = config.data
    settings = SampleSettings(
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        seed=config.training.seed,
        cache_path=data.data_cache_path,
        eod_mask_loss=data.eod_mask_loss,
        reset_attention_mask=data.reset_attention_mask,
    )

    # All ranks must have data of this tokenizer.
    valid_sequence_length = valid_sequence_length or sequence_length
    lengths = (sequence_length, valid_sequence_length, valid_sequence_length)
    blends = config_blends(config)
    agree(lambda: [check_tokenizer(prefix, tokenizer) for prefix in dataset_prefixes(config)])
    return datasets_from_blends(blends, lengths, num_samples, settings)


def datasets_from_blends(
    blends: Sequence[Blend | None],
    sequence_lengths: Sequence[int],
    num_samples: Sequence[int | None],
    settings: SampleSettings,
) -> Datasets:
    """Build the blend of each part. The sequences are per part (train, valid, test); see
    `build_datasets`.
    """

    @functools.cache  # a corpus that is split belongs to several parts
    def open_files(prefix: str) -> IndexedFiles:
        files = agree(lambda: open_indexed_files(prefix))

        # With different data, the ranks would not read disjoint samples.
        fingerprints = set(run_on_all_ranks(lambda: data_fingerprint(prefix)))

        def check_same() -> None:
            if len(fingerprints) > 1:
                raise UserError(
                    f"{prefix}: the machines have different datasets of this name; copy the same "
                    "one to all of them"
                )

        run_on_all_ranks(check_same)
        return files

    parts: list[Samples | None] = []
    for part, blend in enumerate(blends):
        samples, length = num_samples[part], sequence_lengths[part]
        if blend is None or samples == 0:
            parts.append(None)
            continue

        # Its corpora. Of several, the blend repeats each as often as needed.
        corpora, documents = [], []
        corpus_samples = samples if len(blend.prefixes) == 1 else None
        for prefix in blend.prefixes:
            files = open_files(prefix)
            span = _span(files, blend.split, part, length)
            if span is not None:
                corpus = build_corpus_part(files, span, part, length, corpus_samples, settings)
                documents.append(files.documents)
                corpora.append(corpus)

        # Their blend. The share of a part in a split may be 0.
        if not corpora:
            parts.append(None)
        elif len(corpora) == 1:
            parts.append(corpora[0])
        else:
            if samples is None:
                samples = sum(map(len, corpora))
            parts.append(BlendedParts(corpora, blend.shares(documents), samples))
    return Datasets(*parts)


def _span(files: IndexedFiles, split: str | None, part: int, length: int) -> tuple[int, int] | None:
    """The first and one-past-last sequence of a part of a corpus; None for a share of 0, and for a
    part that may be missing: the validation part of a corpus of one document, such as enwik8, and a
    test part of less than a sample.
    """
    # A corpus of its own for the part.
    if split is None:
        return 0, files.sequences
    span = split_spans(split, files.sequences)[part]
    if span is None:
        return None
    is_empty_valid = part == 1 and span[0] == span[1]
    is_small_test = part == 2 and _tokens(files, span) <= length
    if is_empty_valid or is_small_test:
        return None
    return span


def build_corpus_part(
    files: IndexedFiles,
    span: tuple[int, int],
    part: int,
    sequence_length: int,
    samples: int | None,
    settings: SampleSettings,
) -> CorpusPart:
    """Build the samples of sequences `span[0]` to `span[1] - 1`. Every rank must call this; rank 0
    builds the indices.

    Args:
        part: index into PARTS.
        samples: length of the dataset; None means one epoch.

    Raises UserError if there are fewer tokens than one sample, documents do not end as the settings
    require, or the cache folder cannot be written.
    """
    first, last = span
    name = f"{files.prefix} ({PARTS[part]})"
    tokens = _tokens(files, span)

    def check() -> None:
        # A sample is one token longer than its inputs, for the last target.
        if tokens < sequence_length + 1:
            raise UserError(
                f"{name} has {tokens:,} tokens in {last - first:,} documents, but a sample needs "
                f"{sequence_length:,} + 1: use more data, another split, or a smaller seq-length"
            )
        _check_document_ends(files, span, name, settings)

    run_on_all_ranks(check)

    def dataset(kind: type[GPTDataset], folder: str) -> GPTDataset:
        # The span has been selected, so the split of megatron-core is all of it.
        config = GPTDatasetConfig(
            random_seed=settings.seed,
            sequence_length=sequence_length,
            blend=([files.prefix], None),
            split="1",
            path_to_cache=folder,
            tokenizer=_Vocabulary(settings.vocab_size, settings.eod),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=settings.eod_mask_loss,
            create_attention_mask=False,
        )
        documents = np.arange(first, last, dtype=np.int32)
        return kind(FileDataset(files.prefix), files.prefix, documents, None, Split(part), config)

    def build() -> list[np.ndarray]:
        # Without the warning that megatron-core does not save the indices.
        logger = logging.getLogger(GPTDataset.__module__)
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            built = dataset(GPTDataset, "")
        finally:
            logger.setLevel(level)
        return [built.document_index, built.sample_index, built.shuffle_index]

    # Rank 0 builds the indices; the others wait for its files.
    key = [first, last, part, sequence_length, settings.seed]
    folder = cache_folder(files, settings.cache_path, key)
    build_once(folder, build)
    cached = agree(lambda: dataset(_CachedDataset, str(folder)))
    size, order = (last - first, tokens), folder.name.removeprefix("samples-")
    return CorpusPart(cached, name, size, samples, order, settings)


def _check_document_ends(
    files: IndexedFiles, span: tuple[int, int], name: str, settings: SampleSettings
) -> None:
    """Raises UserError if the settings depend on end-of-document tokens, and documents do not end
    with one.

    Reads the last tokens of up to 256 documents, because data of other software have no manifest,
    and merged datasets may have both kinds. GPTDataset shuffles sequences, so each of them counts
    as a document.
    """
    keys = [key for key in ("reset_attention_mask", "eod_mask_loss") if getattr(settings, key)]
    if not keys:
        return

    # Up to 256 documents that are not empty.
    first, last = span
    numbers = np.unique(np.linspace(first, last - 1, _CHECKED_DOCUMENTS, dtype=np.int64))
    numbers = numbers[files.lengths[numbers] > 0]
    ends = files.open_tokens()[files.offsets()[numbers + 1] - 1]
    missing = int((ends != settings.eod).sum())
    found = f"{missing} of {len(numbers)} that were read"
    if files.manifest is not None and not files.manifest.append_eod:
        found = "the manifest says append_eod: false"
    elif not missing:
        return
    raise UserError(
        f"{' and '.join(keys)}: documents in {name} do not end with the end-of-document token (id "
        f"{settings.eod}), which separates them ({found}); preprocess the data with --append-eod, "
        "or remove the key"
    )


class _CachedDataset(GPTDataset):
    """megatron-core's dataset with the indices in the folder `path_to_cache`. megatron-core itself
    builds them only on rank 0, even if other machines do not see its disk, and unpickles what the
    folder contains.
    """

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int32 `[documents]`, int32 or int64 `[samples + 1, 2]`, and uint32 or int64 `[samples]`.
        Raises UserError.
        """
        # Mapped, so that all ranks of a machine share the memory.
        folder = Path(self.config.path_to_cache)
        arrays = []
        try:
            for name in INDICES:
                arrays.append(np.load(folder / name, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{folder}: {first_line(error)}; start again, and it is built again"
            ) from error
        document, sample, shuffle = arrays
        return document, sample, shuffle


def _tokens(files: IndexedFiles, span: tuple[int, int]) -> int:
    return int(files.lengths[span[0] : span[1]].sum(dtype=np.int64))


@dataclass(frozen=True)
class _Vocabulary:
    """The attributes of a tokenizer that GPTDataset uses."""

    vocab_size: int
    eod: int

    @property
    def unique_identifiers(self) -> dict[str, int]:
        """megatron-core includes this in the names of its index files, which do not depend on the
        tokenizer.
        """
        return {}
