"""Batches: samples per rank, resuming, worker processes, ids beyond the vocabulary."""

import itertools
import os
import re
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kerple.attention import Documents
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.data.datasets import SampleSettings
from megatron.data.loader import Loader, rank_samples
from megatron.utils.errors import UserError
from tests.support.checkpoints import write_corpus
from tests.support.datasets import datasets_from_split, end_documents
from tests.support.errors import assert_rejected


@pytest.fixture
def train(corpus, settings):
    return datasets_from_split(corpus, "1", (16, 16, 16), (300, 0, 0), settings).train


def take(dataset, batches, **arguments):
    return list(itertools.islice(Loader(dataset, **arguments), batches))


def rows(batches) -> torch.Tensor:
    return torch.cat([batch["tokens"] for batch in batches])


_SIZES = {"micro": st.integers(1, 5), "ranks": st.integers(1, 5), "accumulation": st.integers(1, 4)}


@given(**_SIZES, consumed=st.integers(0, 10**12), step=st.integers(0, 50))
def test_ranks_partition_the_samples_of_a_step(micro, ranks, accumulation, consumed, step):
    """For any shape of the global batch, a step consumes the same consecutive samples."""
    positions = [
        position
        for rank in range(ranks)
        for batch in range(step * accumulation, (step + 1) * accumulation)
        for position in rank_samples(
            batch,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            consumed_samples=consumed,
        )
    ]
    size = micro * ranks * accumulation
    assert sorted(positions) == list(range(consumed + step * size, consumed + (step + 1) * size))


@hypothesis_settings(max_examples=25, deadline=None)
@given(micro=st.integers(1, 4), ranks=st.integers(1, 3), consumed=st.integers(0, 700))
def test_batches_match_rank_samples(shared_train, micro, ranks, consumed):
    for rank in range(ranks):
        shape = {
            "micro_batch_size": micro,
            "data_parallel_rank": rank,
            "data_parallel_size": ranks,
            "consumed_samples": consumed,
        }
        for number, batch in enumerate(take(shared_train, 3, **shape)):
            for row, position in enumerate(rank_samples(number, **shape)):
                sample = shared_train[position % len(shared_train)]
                assert torch.equal(batch["tokens"][row], sample["tokens"])
                assert torch.equal(batch["labels"][row], sample["labels"])


@hypothesis_settings(max_examples=10, deadline=None)
@given(
    micro=st.integers(1, 4),
    ranks=st.integers(2, 5),
    first=st.integers(0, 280),
    later=st.integers(2, 5),
)
def test_no_sample_is_read_by_two_ranks(shared_train, micro, ranks, first, later):
    """`ranks` ranks read up to about sample `first`, and then `later` ranks the rest; the last
    batch wraps around.
    """
    read, consumed = [], 0
    for count, end in ((ranks, first), (later, len(shared_train))):
        batches = -(-(end - consumed) // (micro * count))
        for rank in range(count):
            shape = {
                "micro_batch_size": micro,
                "data_parallel_rank": rank,
                "data_parallel_size": count,
            }
            for batch in take(shared_train, batches, **shape, consumed_samples=consumed):
                read += map(tuple, batch["tokens"].tolist())
        consumed += batches * micro * count
    expected = [
        tuple(sample["tokens"].tolist()) for sample in map(shared_train.__getitem__, range(300))
    ]
    assert consumed >= 300
    assert Counter(read) == Counter(expected * 2) - Counter(expected[consumed - 300 :])


@pytest.fixture(scope="module")
def shared_train(tmp_path_factory):
    prefix = write_corpus(tmp_path_factory.mktemp("loader"))
    return datasets_from_split(
        prefix, "1", (16, 16, 16), (300, 0, 0), SampleSettings(1000, 0, 1)
    ).train


def test_documents_are_those_of_megatron_core(corpus):
    end_documents(corpus, 7)
    settings = SampleSettings(1000, 7, 1, reset_attention_mask=True)
    (batch,) = take(
        datasets_from_split(corpus, "1", (16,) * 3, (300, 0, 0), settings).train,
        1,
        micro_batch_size=300,
    )
    documents = Documents(batch["document_ids"])
    assert documents.ids[:, -1].any()
    for row, tokens in enumerate(batch["tokens"]):
        mask, _, positions = _get_ltor_masks_and_position_ids(tokens, 7, True, True, False, True)
        same_document = documents.ids[row, :, None] == documents.ids[row]
        assert torch.equal(~same_document | torch.ones(16, 16, dtype=torch.bool).triu(1), mask[0])
        assert torch.equal(documents.positions[row], positions)


def test_worker_processes_do_not_change_batches(train):
    prefetched = take(train, 20, micro_batch_size=4, consumed_samples=5, num_workers=2)
    assert torch.equal(
        rows(prefetched), rows(take(train, 20, micro_batch_size=4, consumed_samples=5))
    )


def test_global_random_state_is_unchanged(train):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    take(train, 3, micro_batch_size=2)
    take(train, 3, micro_batch_size=2, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_restarts_at_the_end(train):
    wrapped = rows(take(train, 4, micro_batch_size=4, consumed_samples=292))
    assert torch.equal(
        wrapped[:8], torch.stack([train[index]["tokens"] for index in range(292, 300)])
    )
    assert torch.equal(wrapped[8:], torch.stack([train[index]["tokens"] for index in range(8)]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_id_beyond_the_vocabulary(corpus, train, num_workers):
    ids = np.memmap(f"{corpus}.bin", dtype=np.uint16, mode="r+")
    ids[len(ids) // 2] = 1000
    ids.flush()
    with pytest.raises(UserError, match=rf"^{re.escape(corpus)} \(train\): token id 1000 .*999"):
        take(train, 300, micro_batch_size=1, num_workers=num_workers)


@pytest.mark.parametrize("negative", [-1, -2])
def test_a_negative_id(tmp_path, settings, negative):
    """int32 files of other software can have them."""
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([5, 3] * 10 + [negative]), [21])
    builder.finalize(str(tmp_path / "a.idx"))
    train = datasets_from_split(str(tmp_path / "a"), "1", (20, 20, 20), (1, 0, 0), settings).train
    assert_rejected(rf"a\.bin.*token id {negative}", take, train, 1, micro_batch_size=1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_truncation_while_training(corpus, train, num_workers):
    """An access to a memory map of the file would kill the process with SIGBUS."""
    batches = iter(Loader(train, micro_batch_size=1, num_workers=num_workers))
    next(batches)
    os.truncate(f"{corpus}.bin", 5000)
    expected = rf"^{re.escape(corpus)}.bin was truncated .*: it ends before byte [\d,]+; rebuild it"
    with pytest.raises(UserError, match=expected) as error:
        list(itertools.islice(batches, 200))
    assert "\n" not in str(error.value)
