"""Batches: which samples a rank takes, resuming, background workers, ids beyond the vocabulary."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron.data import build_loader
from megatron.data.datasets import datasets_from_split
from megatron.data.loader import rank_samples
from megatron.data.samples import SampleSettings
from megatron.utils.errors import UserError


@pytest.fixture
def train(corpus, settings):
    return datasets_from_split(corpus, "1", (16, 16, 16), (300, 0, 0), settings).train


def take(dataset, batches, **arguments):
    return list(itertools.islice(build_loader(dataset, **arguments), batches))


def rows(batches) -> torch.Tensor:
    return torch.cat([batch["tokens"] for batch in batches])


_SIZES = {"micro": st.integers(1, 5), "ranks": st.integers(1, 5), "accumulation": st.integers(1, 4)}


@given(**_SIZES, consumed=st.integers(0, 10**12), step=st.integers(0, 50))
def test_ranks_share_a_step_without_gap_or_overlap(micro, ranks, accumulation, consumed, step):
    """Whatever the shape of a global batch, a step takes the same consecutive samples."""
    taken = [
        position
        for rank in range(ranks)
        for batch in range(step * accumulation, (step + 1) * accumulation)
        for position in rank_samples(
            batch, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=ranks, consumed_samples=consumed
        )
    ]
    size = micro * ranks * accumulation
    assert sorted(taken) == list(range(consumed + step * size, consumed + (step + 1) * size))


@given(**_SIZES, consumed=st.integers(0, 10**6), done=st.integers(0, 20), ahead=st.integers(0, 20))
def test_resuming_goes_on_where_it_stopped(micro, ranks, accumulation, consumed, done, ahead):
    shape = {"micro_batch_size": micro, "data_parallel_rank": ranks - 1, "data_parallel_size": ranks}
    resumed = consumed + done * micro * ranks
    assert rank_samples(done + ahead, consumed_samples=consumed, **shape) == rank_samples(
        ahead, consumed_samples=resumed, **shape
    )


@hypothesis_settings(max_examples=25, deadline=None)
@given(micro=st.integers(1, 4), ranks=st.integers(1, 3), consumed=st.integers(0, 700))
def test_batches_follow_the_rule(shared_train, micro, ranks, consumed):
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


@pytest.fixture(scope="module")
def shared_train(tmp_path_factory):
    from megatron.data.indexed_writer import IndexedWriter

    prefix = str(tmp_path_factory.mktemp("loader") / "corpus")
    with IndexedWriter(prefix, 1000) as writer:
        writer.add(np.random.default_rng(0).integers(0, 1000, 5000).astype(np.uint16), np.full(50, 100))
        writer.finish()
    return datasets_from_split(prefix, "1", (16, 16, 16), (300, 0, 0), SampleSettings(1000, 0, 1)).train


def test_shapes(train):
    (batch,) = take(train, 1, micro_batch_size=3)
    assert set(batch) == {"tokens", "labels"}
    assert batch["tokens"].shape == batch["labels"].shape == (3, 16)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])


def test_loss_mask_only_where_it_says_something(corpus):
    masked = datasets_from_split(
        corpus, "1", (16,) * 3, (9, 0, 0), SampleSettings(1000, 7, 1, eod_mask_loss=True)
    ).train
    (batch,) = take(masked, 1, micro_batch_size=9)
    assert batch["loss_mask"].shape == (9, 16)
    assert batch["loss_mask"].dtype == torch.float32


def test_two_ranks_see_what_one_sees(train):
    alone = rows(take(train, 10, micro_batch_size=4))
    pair = [take(train, 10, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2) for rank in (0, 1)]
    together = torch.cat([torch.cat([first["tokens"], second["tokens"]]) for first, second in zip(*pair, strict=True)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_background_workers_change_nothing(train, num_workers):
    ahead = take(train, 90, micro_batch_size=4, consumed_samples=5, num_workers=num_workers)
    assert torch.equal(rows(ahead), rows(take(train, 90, micro_batch_size=4, consumed_samples=5)))


def test_torchs_global_generator_is_left_alone(train):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    take(train, 3, micro_batch_size=2)
    take(train, 3, micro_batch_size=2, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_past_the_end_it_starts_over(train):
    around = rows(take(train, 4, micro_batch_size=4, consumed_samples=292))
    assert torch.equal(around[:8], torch.stack([train[index]["tokens"] for index in range(292, 300)]))
    assert torch.equal(around[8:], torch.stack([train[index]["tokens"] for index in range(8)]))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_id_beyond_the_vocabulary(corpus, settings, train, num_workers):
    """An id that came after the check: the .bin was changed in place, its lengths are the same."""
    ids = np.memmap(f"{corpus}.bin", dtype=np.uint16, mode="r+")
    ids[len(ids) // 2] = 1000
    ids.flush()
    with pytest.raises(
        UserError, match=r"corpus \(train\): token id 1000 in sample \d+, but the vocabulary ends at 999"
    ):
        take(train, 300, micro_batch_size=1, num_workers=num_workers)


@pytest.mark.parametrize(
    "arguments",
    [{"micro_batch_size": 0}, {"data_parallel_rank": 2, "data_parallel_size": 2}, {"consumed_samples": -1}],
)
def test_impossible_positions(train, arguments):
    with pytest.raises(ValueError, match="not a possible position"):
        build_loader(train, **{"micro_batch_size": 1, **arguments})
