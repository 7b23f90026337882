"""From the configuration's data paths, split and weights to training, validation and test samples."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.data.remote_dataset import open_files
from megatron.data.samples import BlendedParts, CorpusPart, SampleSettings, build_corpus_part
from megatron.data.selection import Blend, config_blends, split_spans
from megatron.tokenizer import Tokenizer

Samples = CorpusPart | BlendedParts


class Datasets(NamedTuple):
    """Samples per part; None where a part was not asked for, or its share of the split is 0."""

    train: Samples | None
    valid: Samples | None
    test: Samples | None


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


def datasets_from_split(
    prefix: str,
    split: str,
    sequence_lengths: Sequence[int],
    num_samples: Sequence[int | None],
    settings: SampleSettings,
) -> Datasets:
    """One corpus, its documents divided in proportion to `split`; the two lists are per part (train, valid, test)."""
    files = open_files(prefix, settings.cache_path)
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
        corpora, documents = [], []
        for prefix in blend.prefixes:
            files = open_files(prefix, settings.cache_path)
            alone = samples if len(blend.prefixes) == 1 else None
            span = (0, files.sequences)
            documents.append(files.documents)
            corpora.append(build_corpus_part(files, span, part, sequence_lengths[part], alone, settings))
        if len(corpora) == 1:
            parts.append(corpora[0])
            continue
        samples = sum(map(len, corpora)) if samples is None else samples
        parts.append(BlendedParts(corpora, blend.shares(documents), samples))
    return Datasets(*parts)
