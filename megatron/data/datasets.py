"""From the configuration's data paths, split and weights to training, validation and test samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.config.errors import UserError
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.data.indexed_format import check_indexed_files
from megatron.data.samples import PARTS, BlendedParts, CorpusPart, SampleSettings, build_corpus_part
from megatron.tokenizer import Tokenizer

Samples = CorpusPart | BlendedParts


class Datasets(NamedTuple):
    """Samples per part; None where a part was not asked for, or its share of the split is 0."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


@dataclass(frozen=True)
class Blend:
    """Prefixes of the corpora to draw from, with their shares; equal shares where none are given (GPT-NeoX's rule)."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def __post_init__(self):
        if not self.prefixes:
            raise UserError("a list of data paths is empty")
        if self.weights is None:
            return
        if len(self.weights) != len(self.prefixes):
            raise UserError(
                f"{len(self.weights)} weights for {len(self.prefixes)} data paths ({', '.join(self.prefixes)})"
            )
        if not all(np.isfinite(weight) and weight > 0 for weight in self.weights):
            raise UserError(f"data weights must be positive numbers, but are {list(self.weights)}")


def build_datasets(
    config,
    tokenizer: Tokenizer,
    sequence_length: int,
    num_samples: Sequence[int | None],
    valid_sequence_length: int | None = None,
) -> Datasets:
    """The datasets that `config.data` names, in the order that `config.training.seed` decides.

    Every rank must call this: rank 0 builds the sample indices while the others wait; all get the same datasets.

    Args:
        config: a `megatron.config.Config`.
        sequence_length: tokens of a sample's input; labels are the input moved on by one.
        num_samples: samples of train, valid, test: None one epoch, 0 none. More than an epoch holds is fine.
        valid_sequence_length: of the validation and test samples, if it differs (`seq-length-val`).
    """
    data = config.data
    settings = SampleSettings(
        tokenizer.vocab_size, tokenizer.eod, config.training.seed, data.data_cache_path, data.eod_mask_loss
    )
    valid_sequence_length = valid_sequence_length or sequence_length
    lengths = (sequence_length, valid_sequence_length, valid_sequence_length)
    blends = config_blends(config)
    if blends is None:
        return datasets_from_split(data.data_path, data.split, lengths, num_samples, settings)
    return datasets_from_blends(blends, lengths, num_samples, settings)


def config_blends(config) -> list[Blend | None] | None:
    """The blends of train, valid, test that `config.data` names; None if it names one corpus to split instead."""
    data = config.data
    given = [
        (data.train_data_paths, data.train_data_weights),
        (data.valid_data_paths, data.valid_data_weights),
        (data.test_data_paths, data.test_data_weights),
    ]
    if not any(paths for paths, _ in given):
        if not data.data_path:
            raise UserError("no data: set data-path, or train-data-paths and valid-data-paths")
        return None
    if data.data_path:
        raise UserError("data-path and train/valid/test-data-paths exclude each other: set one of the two")
    return [Blend(tuple(paths), tuple(weights) if weights else None) if paths else None for paths, weights in given]


def datasets_from_split(
    prefix: str,
    split: str,
    sequence_lengths: Sequence[int],
    num_samples: Sequence[int | None],
    settings: SampleSettings,
) -> Datasets:
    """One corpus, its documents divided in proportion to `split`; the two lists are per part (train, valid, test)."""
    files = check_indexed_files(prefix)
    parts = []
    for part, span in enumerate(split_spans(split, files.sequences)):
        if num_samples[part] == 0 or span is None:
            parts.append(None)
            continue
        parts.append(build_corpus_part(files, span, part, sequence_lengths[part], num_samples[part], settings))
    return Datasets(*parts)


def datasets_from_blends(
    blends: Sequence[Blend | None],
    sequence_lengths: Sequence[int],
    num_samples: Sequence[int | None],
    settings: SampleSettings,
) -> Datasets:
    """For each part (train, valid, test) a blend of whole corpora; None samples means as many as they hold together."""
    parts = []
    for part, blend in enumerate(blends):
        samples = num_samples[part]
        if blend is None or samples == 0:
            parts.append(None)
            continue
        corpora = []
        for prefix in blend.prefixes:
            files = check_indexed_files(prefix)
            alone = samples if len(blend.prefixes) == 1 else None
            span = (0, files.sequences)
            corpora.append(build_corpus_part(files, span, part, sequence_lengths[part], alone, settings))
        if len(corpora) == 1:
            parts.append(corpora[0])
            continue
        samples = sum(map(len, corpora)) if samples is None else samples
        parts.append(BlendedParts(corpora, blend.weights or [1.0] * len(corpora), samples))
    return Datasets(*parts)


def split_spans(split: str, sequences: int) -> list[tuple[int, int] | None]:
    """First and one-past-last sequence of train, valid and test, by megatron-core's arithmetic; None for a share of 0.

    Raises:
        UserError: `split` is not one to three non-negative numbers with a positive sum.
    """
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(PARTS) or not all(0 <= share < np.inf for share in shares) or sum(shares) == 0:
        raise UserError(f"split {split!r} is not of the form TRAIN,VALID,TEST, for example 949,50,1")
    # Written out plainly: megatron-core's parser knows no exponents.
    plain = ",".join(np.format_float_positional(share) for share in shares)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(plain))
    return [span and (round(span[0] * sequences), round(span[1] * sequences)) for span in matrix]
