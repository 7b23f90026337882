"""Datasets: equality with megatron-core, epochs, blends, and invalid data."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data import datasets
from megatron.data.datasets import (
    BlendedParts,
    SampleSettings,
    build_datasets,
    datasets_from_blends,
)
from megatron.data.indexed_dataset import open_indexed_files, write_manifest
from megatron.data.splits import Blend
from tests.support.corpora import manifest_of
from tests.support.datasets import datasets_from_split, end_documents
from tests.support.errors import assert_rejected

LENGTHS = (32, 32, 32)
ONE_EPOCH = (None, None, None)


def megatron_core_datasets(tmp_path, sizes, sequence_length=32, seed=1234, **selection):
    """The datasets that megatron-core's own builder makes."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        path_to_cache=str(tmp_path / "megatron-core cache"),
        tokenizer=SimpleNamespace(vocab_size=1000, eod=0, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **selection,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def tokens(dataset, count=None) -> torch.Tensor:
    return torch.stack([dataset[index]["tokens"] for index in range(count or len(dataset))])


@pytest.fixture
def one_process_group():
    """megatron-core's builder needs a process group for blends."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_samples_of_megatron_core(tmp_path, corpus, settings):
    ours = datasets_from_split(corpus, "949,51", LENGTHS, (100, None, 0), settings)
    expected = megatron_core_datasets(tmp_path, (100, 1, 1), blend=([corpus], None), split="949,51")
    assert len(ours.train) == 100
    assert ours.test is None
    for part, count in ((0, 100), (1, len(ours.valid))):
        for index in range(count):
            for key in ("tokens", "labels", "loss_mask"):
                assert torch.equal(ours[part][index][key], expected[part][index][key])
    assert torch.equal(ours.train[0]["tokens"][1:], ours.train[0]["labels"][:-1])


def test_weighted_blend_of_megatron_core(tmp_path, write_corpus, settings, one_process_group):
    prefixes = [str(tmp_path / name) for name in "abc"]
    for seed, prefix in enumerate(prefixes):
        write_corpus(prefix, np.random.default_rng(seed).integers(50, 150, 200), seed=seed)
    weights = [1.0, 5.0, 2.5]
    blend = (prefixes, weights)
    expected = megatron_core_datasets(tmp_path, (300, 20, 5), blend_per_split=[blend, blend, None])
    blends = [Blend(tuple(prefixes), tuple(weights))] * 2 + [None]
    ours = datasets_from_blends(blends, LENGTHS, (300, 20, 5), settings)
    assert torch.equal(tokens(ours.train, 300), tokens(expected[0], 300))
    assert torch.equal(tokens(ours.valid, 20), tokens(expected[1], 20))
    assert ours.test is None


def test_shares_of_a_blend(tmp_path, write_corpus, settings):
    """Ids are 0-99 in the first corpus and 100-199 in the second, so each sample shows where it
    comes from.
    """
    for number, name in enumerate("ab"):
        ids = (
            np.random.default_rng(number)
            .integers(100 * number, 100 * (number + 1), 5000)
            .astype(np.uint16)
        )
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        builder.add_document(torch.from_numpy(ids.astype(np.int32)), [len(ids)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
    prefixes = (str(tmp_path / "a"), str(tmp_path / "b"))
    for weights, expected in (((1, 3), 750), (None, 500)):
        blend = datasets_from_blends(
            [Blend(prefixes, weights), None, None], LENGTHS, (1000, 0, 0), settings
        ).train
        of_second = [int(blend[index]["tokens"].min()) >= 100 for index in range(1000)]
        assert abs(sum(of_second) - expected) <= 1
        assert [
            blend.source(index) == f"{prefixes[1]} (train)" for index in range(1000)
        ] == of_second
    # An epoch of each corpus has 4,999 // 32 = 156 samples.
    for line, prefix in zip(blend.describe(), prefixes, strict=True):
        assert prefix in line
        assert "1 documents, 5,000 tokens, 156 samples" in line
        assert f"{500 / 156:.2f} epochs" in line


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    samples=st.integers(1, 400),
    fewer=st.integers(0, 400),
)
def test_blends_in_general(weights, samples, fewer):
    """Every prefix of a blend has the requested shares, positions are consecutive, and a shorter
    blend is a prefix.
    """
    parts = [
        SimpleNamespace(
            name=str(n), order=str(n), settings=None, sample=lambda position, n=n: (n, position)
        )
        for n in range(len(weights))
    ]
    blend = BlendedParts(parts, weights, samples)
    drawn = [blend[index] for index in range(samples)]
    counts = np.zeros(len(parts), dtype=int)
    for number, (part, position) in enumerate(drawn, start=1):
        assert position == counts[part]
        counts[part] += 1
        assert np.all(
            np.abs(counts - number * np.array(weights) / sum(weights)) < max(len(parts), 2) - 0.5
        )
    shorter = BlendedParts(parts, weights, min(samples, fewer + 1))
    assert [shorter[index] for index in range(len(shorter))] == drawn[: len(shorter)]
    assert shorter.order == blend.order


def test_epochs(corpus, settings):
    once = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
    epoch = once.samples_per_epoch
    thrice = datasets_from_split(corpus, "1", LENGTHS, (3 * epoch, 0, 0), settings).train
    rows = tokens(thrice)
    assert torch.equal(rows[:epoch], tokens(once))
    ordered = [
        sorted(map(tuple, rows[start : start + epoch].tolist())) for start in (0, epoch, 2 * epoch)
    ]
    assert ordered[0] == ordered[1] == ordered[2]
    assert not torch.equal(rows[:epoch], rows[epoch : 2 * epoch])
    assert not torch.equal(rows[epoch : 2 * epoch], rows[2 * epoch :])
    with pytest.raises(IndexError):
        thrice[3 * epoch]
    (line,) = thrice.describe()
    documents, tokens_ = (
        len(once._dataset.indices),
        len(np.fromfile(f"{corpus}.bin", dtype=np.uint16)),
    )
    for number in (
        f"{documents:,} documents",
        f"{tokens_:,} tokens",
        f"{3 * epoch:,} samples",
        "3.00 epochs",
    ):
        assert number in line


def test_order_does_not_depend_on_the_length_of_the_run(tmp_path, write_corpus, corpus, settings):
    short = datasets_from_split(corpus, "1", LENGTHS, (500, 0, 0), settings).train
    long = datasets_from_split(corpus, "1", LENGTHS, (5000, 0, 0), settings).train
    assert torch.equal(tokens(short), tokens(long, 500))
    assert short.order == long.order
    write_corpus(tmp_path / "second", [300] * 5)
    blend = [Blend((corpus, str(tmp_path / "second")), (2, 1)), None, None]
    short = datasets_from_blends(blend, LENGTHS, (300, 0, 0), settings).train
    long = datasets_from_blends(blend, LENGTHS, (900, 0, 0), settings).train
    assert torch.equal(tokens(short), tokens(long, 300))
    assert short.order == long.order


def test_order_identifies_the_samples(corpus, tmp_path, write_corpus, settings):
    def order(prefix=corpus, seed=1234, length=32, split="1", samples=None):
        sample_settings = SampleSettings(1000, 0, seed)
        return datasets_from_split(
            prefix, split, (length,) * 3, (samples, 0, 0), sample_settings
        ).train.order

    write_corpus(tmp_path / "second", [50, 60])
    orders = [
        order(),
        order(seed=1),
        order(length=16),
        order(split="9,1"),
        order(prefix=str(tmp_path / "second")),
    ]
    assert len(set(orders)) == len(orders)
    assert order(samples=7) == order()


def test_loss_mask_at_the_end_of_documents(corpus):
    end_documents(corpus, 7)
    settings = SampleSettings(1000, 7, 1234, eod_mask_loss=True)
    train = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
    rows = [train[index] for index in range(len(train))]
    assert any((row["tokens"] == 7).any() for row in rows)
    assert all(torch.equal(row["loss_mask"], (row["tokens"] != 7).float()) for row in rows)


# --- invalid data


def test_sequence_longer_than_the_data(tmp_path, write_corpus, settings):
    write_corpus(tmp_path / "small", [20, 12])

    def split(shares, length, num_samples=ONE_EPOCH):
        return datasets_from_split(
            str(tmp_path / "small"), shares, (length,) * 3, num_samples, settings
        )

    assert len(split("1", 31).train) == 1
    assert_rejected(r"small \(train\).*32.*2.*32 \+ 1", split, "1", 32)
    assert_rejected(r"small \(valid\) has 12 tokens in 1 documents", split, "1,1", 16)
    assert split("1,1", 16, (1, 0, 0)).valid is None
    # A test part that is too small is not an error; that of 12 tokens is one sample of 11.
    assert split("1,0,1", 12, (1, 0, 1)).test is None
    test = split("1,0,1", 11, (1, 0, None)).test
    assert (len(test), test.samples_per_epoch) == (1, 1)
    assert split("98,1,1", 4, (1, 1, 1))[1:] == (None, None)


# --- from a configuration


TOKENIZER = SimpleNamespace(vocab_size=1000, eod=0)


def test_build_datasets_from_one_corpus(configuration, corpus, settings):
    datasets = build_datasets(
        configuration(data_path=corpus, split="8,1,1"), TOKENIZER, 32, (10, 3, 0), 64
    )
    expected = datasets_from_split(corpus, "8,1,1", (32, 64, 64), (10, 3, 0), settings)
    assert torch.equal(tokens(datasets.train), tokens(expected.train))
    assert torch.equal(tokens(datasets.valid), tokens(expected.valid))
    assert datasets.test is None


def test_build_datasets_from_separate_paths(
    configuration, corpus, tmp_path, write_corpus, settings
):
    write_corpus(tmp_path / "valid", [200] * 9)
    valid = [str(tmp_path / "valid")]
    config = configuration(
        train_data_paths=[corpus, *valid], train_data_weights=[0.7, 0.3], valid_data_paths=valid
    )
    datasets = build_datasets(config, TOKENIZER, 32, (50, None, None))
    blends = [Blend((corpus, *valid), (0.7, 0.3)), Blend(tuple(valid)), None]
    expected = datasets_from_blends(blends, LENGTHS, (50, None, 0), settings)
    assert torch.equal(tokens(datasets.train), tokens(expected.train))
    assert len(datasets.valid) == datasets.valid.samples_per_epoch == (9 * 200 - 1) // 32
    assert datasets.test is None


def test_data_of_another_tokenizer_are_rejected(
    configuration, corpus, tmp_path, write_corpus, tokenizer
):
    """Even if its ids fit into the vocabulary."""
    write_corpus(tmp_path / "other", [200] * 9, vocab_size=tokenizer.vocab_size)
    other = str(tmp_path / "other")
    manifest = manifest_of(open_indexed_files(other), tokenizer.vocab_size - 1)
    write_manifest(other, manifest)
    message = r"other was tokenized with HFTokenizer with 2,000 ids .* not with .* 600 ids"
    separate = {"train_data_paths": [corpus], "valid_data_paths": [other]}
    for keys in ({"data_path": other, "split": "1"}, separate):
        assert_rejected(message, build_datasets, configuration(**keys), tokenizer, 32, (10, 0, 0))
    write_manifest(other, replace(manifest, tokenizer_fingerprint=tokenizer.fingerprint))
    assert (
        len(
            build_datasets(
                configuration(data_path=other, split="1"), tokenizer, 32, (10, 0, 0)
            ).train
        )
        == 10
    )


@pytest.mark.parametrize("key", ["reset_attention_mask", "eod_mask_loss"])
def test_documents_without_an_end_cannot_be_kept_apart(configuration, corpus, key):
    """Their last tokens decide, or else the manifest. Each part is checked, if the run reads it."""
    tokenizer = SimpleNamespace(vocab_size=1000, eod=11, fingerprint="a")
    keys = {"data_path": corpus, "split": "8,1,1"}
    assert len(build_datasets(configuration(**keys), tokenizer, 32, (10, 0, 0)).train) == 10
    config, ends = configuration(**keys, **{key: True}), rf"{key}: .*corpus \(%s\).*--append-eod"
    assert_rejected(ends % "train", build_datasets, config, tokenizer, 32, (10, 3, 3))
    end_documents(corpus, 11)
    build_datasets(config, tokenizer, 32, (10, 3, 3))

    # Other documents at the end, as after merging.
    sequences = open_indexed_files(corpus).sequences
    for part, first in ((1, int(0.85 * sequences)), (2, sequences - 1)):
        end_documents(corpus, 12, first)
        build_datasets(config, tokenizer, 32, (10, 3 * (part == 2), 0))
        assert_rejected(
            ends % ("train", "valid", "test")[part],
            build_datasets,
            config,
            tokenizer,
            32,
            (10, 3, 3),
        )
        end_documents(corpus, 11)

    # A manifest that says so.
    manifest = replace(manifest_of(open_indexed_files(corpus), 999), tokenizer_fingerprint="a")
    write_manifest(corpus, replace(manifest, append_eod=False))
    assert_rejected(
        ends.replace(".*--", ".*append_eod: false.*--") % "train",
        build_datasets,
        config,
        tokenizer,
        32,
        (10, 3, 3),
    )
    write_manifest(corpus, manifest)
    build_datasets(config, tokenizer, 32, (10, 3, 3))


def test_sequences_of_one_document_are_shuffled_too(tmp_path, settings):
    """So each needs its own end."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16)
    for _ in range(20):
        builder.add_document(torch.tensor([5, 3, 4, 6, 7]), [2, 0, 3])
    builder.finalize(str(tmp_path / "a.idx"))
    settings = replace(settings, eod=7, reset_attention_mask=True)
    assert_rejected(
        "20 of 40", datasets_from_split, str(tmp_path / "a"), "1", LENGTHS, ONE_EPOCH, settings
    )
    end_documents(tmp_path / "a", 7)
    assert (
        len(datasets_from_split(str(tmp_path / "a"), "1", LENGTHS, ONE_EPOCH, settings).train) == 3
    )


def test_machines_with_different_data(corpus, settings, monkeypatch):
    """Each has its own disk."""
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    monkeypatch.setattr(
        datasets, "run_on_all_ranks", lambda function: [function(), "of another machine"]
    )
    assert_rejected(corpus, datasets_from_split, corpus, "1", LENGTHS, ONE_EPOCH, settings)


@pytest.mark.parametrize(("exponent", "share"), [(1.0, 0.9), (0.5, 0.75), (0.0, 0.5)])
def test_blend_by_documents(configuration, tmp_path, write_corpus, exponent, share):
    """p ~ n^a (Conneau et al. 2020): 90 and 10 documents are 9:1, or 3:1 with a = 1/2."""
    paths = [str(tmp_path / name) for name in ("large", "small")]
    for path, documents in zip(paths, (90, 10), strict=True):
        write_corpus(path, [100] * documents)
    keys = {"weight_by_num_documents": True, "weighted_sampler_alpha": exponent}
    config = configuration(train_data_paths=paths, valid_data_paths=paths, **keys)
    datasets = build_datasets(config, TOKENIZER, 32, (1000, 40, 0))
    for blend in (datasets.train, datasets.valid):
        drawn = sum("large" in blend.source(index) for index in range(len(blend)))
        assert abs(drawn - share * len(blend)) <= 1
