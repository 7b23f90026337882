"""A tensor-parallel rank's heads."""

from megatron.model.settings import TensorParallel


def test_each_tensor_parallel_rank_has_its_own_heads():
    assert [TensorParallel(size=3, rank=rank).heads(12) for rank in range(3)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 12),
    ]
