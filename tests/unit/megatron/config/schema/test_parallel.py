import pytest

from megatron.config.schema.parallel import BatchConfig, ParallelConfig
from tests.support.errors import assert_rejected


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "accumulation", "replicas", "expected"),
    [
        (None, 4, None, 2, (4, 1, 8)),
        (None, 4, 3, 2, (4, 3, 24)),
        (24, 4, None, 2, (4, 3, 24)),
        (24, None, 3, 2, (4, 3, 24)),
        (24, None, None, 2, (12, 1, 24)),
        (24, 4, 3, 2, (4, 3, 24)),
    ],
)
def test_batch_sizes(global_batch, micro_batch, accumulation, replicas, expected):
    assert batch(global_batch, micro_batch, accumulation).resolve(replicas) == expected


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "accumulation", "message"),
    [
        (None, None, 2, "train_micro_batch_size_per_gpu.*train_batch_size"),
        (10, 4, None, "train_batch_size 10.*4.*2 data-parallel.*8"),
        (4, 4, None, r"4 is not a multiple of .* = 8"),
        (9, None, 3, "9.*gradient_accumulation_steps 3.*2"),
        (24, 4, 2, "train_batch_size.*24.*4.*2 data-parallel.*16"),
    ],
)
def test_contradictory_batch_sizes(global_batch, micro_batch, accumulation, message):
    assert_rejected(message, batch(global_batch, micro_batch, accumulation).resolve, 2)


def batch(global_batch, micro_batch, accumulation) -> BatchConfig:
    return BatchConfig(
        train_batch_size=global_batch,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
    )


def test_data_parallel_size():
    parallel = ParallelConfig(pipe_parallel_size=2, model_parallel_size=2)
    assert parallel.data_parallel_size(8) == 2
    assert_rejected(r"6 process.*4", parallel.data_parallel_size, 6)
    assert_rejected("use a multiple of 4", parallel.data_parallel_size, 2)
