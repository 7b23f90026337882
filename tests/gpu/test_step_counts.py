"""The counting benchmark against hand computation. `test_engine.py` checks the targets of the 162M
recipe.
"""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.step_counts import Launch, StepCounter, step_seconds
from kerple.attention import attend
from megatron.model.gpt import GPT
from tests.gpu.test_methods import cuda_model, settings_for
from tests.support.simulated_cuda.traffic import Cost


def empty(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def costs(device: StepCounter) -> dict[str, Cost]:
    """The costs by name since the last call."""
    result = {launch.name: launch.cost for launch in device.launches}
    assert len(result) == len(device.launches)
    device.reset()
    return result


def test_a_linear_layer():
    """[4, 8] x [8, 16]: 1,024 FLOPs per product, 4 bytes per element."""
    with StepCounter() as device:
        inputs, weight, bias = empty(4, 8), empty(16, 8, grad=True), empty(16, grad=True)
        result = F.linear(inputs, weight, bias)
        forward = costs(device)
        result.backward(empty(4, 16))
        backward = costs(device)
    assert forward == {"addmm": Cost(1, 4 * (16 + 32 + 128 + 64), 1024)}
    assert backward == {"mm": Cost(1, 4 * (64 + 32 + 128), 1024), "sum": Cost(1, 4 * (64 + 16), 0)}


def test_elementwise_operators_and_lookups():
    with StepCounter() as device:
        table, wide = empty(1000, 4), empty(10, 100)
        rows = torch.empty(6, dtype=torch.long, device="cuda")
        _ = wide + empty(100).expand(10, 100)
        wide.mul_(2.0)
        wide.zero_()
        _ = wide.t().expand(3, 100, 10)[0].view(100, 10)
        half = wide.to(torch.bfloat16)
        half.copy_(wide)
        F.embedding(rows, table)
        table.index_add_(0, rows, empty(6, 4))
        torch.relu(
            torch.as_strided(wide, (50, 50), (1, 1))
        )  # 99 elements in memory; the cost counts at most all
        found = costs(device)
    assert found == {
        "add": Cost(1, 4 * (1000 + 100 + 1000), 0),
        "mul_": Cost(1, 4 * 2000, 0),
        "zero_": Cost(1, 4 * 1000, 0),
        "_to_copy": Cost(1, 6 * 1000, 0),
        "copy_": Cost(1, 6 * 1000, 0),
        "embedding": Cost(1, 8 * 6 + 4 * (24 + 24), 0),
        "index_add_": Cost(1, 8 * 6 + 4 * (24 + 24 + 24), 0),
        "relu": Cost(1, 4 * (1000 + 2500), 0),
    }


def test_operators_with_several_kernels():
    with StepCounter() as device:
        F.pad(empty(4, 8), (2, 2))  # fills the result, then copies the input
        assert costs(device)["constant_pad_nd"].launches == 2
        F.pad(empty(4, 8), (-2, 0))
        assert costs(device)["constant_pad_nd"].launches == 1
        hidden, weight = empty(4, 8, grad=True), empty(8, grad=True)
        result = F.layer_norm(hidden, (8,), weight)
        device.reset()
        result.backward(empty(4, 8))
        # Gradient, input, mean and 1 / deviation of 4 rows, and weight, read by two kernels; two
        # results.
        assert costs(device) == {
            "native_layer_norm_backward": Cost(2, 4 * (2 * (32 + 32 + 4 + 4 + 8) + 32 + 8), 0)
        }
        small = [empty(3) for _ in range(130)]
        torch._foreach_mul_(small, 2.0)  # 110 tensors per launch
        large = [empty(400 * 65_536)]
        torch._foreach_copy_(
            large, [large[0].to(torch.bfloat16)]
        )  # 320 blocks of 65,536 elements per launch
        torch._foreach_add_(
            small, [empty(3, dtype=torch.bfloat16) for _ in small]
        )  # dtypes differ: one by one
        found = costs(device)
    assert [
        found[name].launches for name in ("_foreach_mul_", "_foreach_copy_", "_foreach_add_")
    ] == [2, 2, 130]
    assert found["_foreach_mul_"].bytes == 130 * 3 * 4 * 2


def test_the_attention_kernel():
    """128 queries and keys are one tile of queries and two of keys; both products of a tile count
    completely.
    """
    with StepCounter() as device:
        query, key, value = (empty(2, 3, 128, 64, dtype=torch.bfloat16) for _ in range(3))
        attend(query, key, value, bias_table=empty(3, 128), backend="fused")
        cost = next(
            launch.cost for launch in device.launches if launch.name == "triton.forward_kernel"
        )
        table = next(launch.cost for launch in device.launches if launch.name == "constant_pad_nd")
    assert cost.flops == 2 * 2 * 6 * 128 * 128 * 64
    padded_table = table.bytes - 4 * 3 * 128
    assert cost.bytes == 4 * (2 * 6 * 128 * 64) + 4 * (6 * 128) + padded_table


def test_keys_and_values_of_grouped_queries_are_not_copied():
    """8 query heads share 2 key/value heads: every kernel reads and writes 2 of keys, values and
    their gradients.
    """
    with StepCounter() as device:
        query, upstream = (
            empty(2, 8, 128, 64, dtype=torch.bfloat16, grad=grad) for grad in (True, False)
        )
        key, value = (empty(2, 2, 128, 64, dtype=torch.bfloat16, grad=True) for _ in range(2))
        device.reset()
        attend(query, key, value, bias_table=empty(8, 128, grad=True), backend="fused").backward(
            upstream
        )
        kernels = {
            launch.name: launch.cost
            for launch in device.launches
            if launch.name.startswith("triton.")
        }
        others = [launch for launch in device.launches if not launch.name.startswith("triton.")]
    queries, keys = 2 * (2 * 8 * 128 * 64), 2 * (2 * 2 * 128 * 64)
    lse, row_stats, table, tile = (
        4 * (2 * 8 * 128),
        8 * (2 * 8 * 128),
        4 * (8 * (256 + 128 + 256)),
        4 * 64 * 64,
    )
    inputs = queries + 2 * keys + table
    assert kernels["triton.forward_kernel"].bytes == inputs + queries + lse
    assert kernels["triton.key_value_kernel"].bytes == inputs + queries + row_stats + 2 * keys
    assert kernels["triton.query_kernel"].bytes == inputs + queries + row_stats + queries
    # The tiles are summed in parts: 8 heads, 4 tiles of queries, 2 block distances. The weight has
    # no tiles.
    assert (
        kernels["triton.sum_tiles_kernel"].bytes
        == inputs + queries + row_stats + 8 * 4 * 2 * tile + 4
    )
    # Both kernels compute complete tiles: 1 of queries and 2 of keys, 2 of queries and 1 of keys,
    # for all query heads.
    assert kernels["triton.forward_kernel"].flops == 2 * 2 * (2 * 8) * 128 * 128 * 64
    assert kernels["triton.key_value_kernel"].flops == 4 * 2 * (2 * 8) * 128 * 128 * 64
    assert max(launch.cost.bytes for launch in others) < keys  # only operators on tables


def test_memory_and_time():
    with StepCounter() as device:
        before = device.allocated
        first = empty(1024)
        view = first[:10]
        del first
        assert device.allocated == before + 4096
        del view
        assert device.allocated == before
        assert device.peak >= before + 4096
    launches = [Launch("mm", "MLP", Cost(1, 10, 100)), Launch("add", "MLP", Cost(1, 50, 0))]
    assert step_seconds(launches, flops=10, bandwidth=5) == pytest.approx(100 / 10 + 50 / 5)
    assert step_seconds(launches, flops=100, bandwidth=5) == pytest.approx(10 / 5 + 50 / 5)


def test_parts_of_a_step():
    """Operators of a one-layer model are assigned to their part of the step, in both passes."""
    with StepCounter() as device:
        model: GPT = cuda_model(settings_for("kerple_log", "auto", "num-layers=1")).train()
        tokens = torch.zeros(4, 512, dtype=torch.long, device="cuda")
        model.loss(tokens, tokens).backward()
        parts: dict[str, set[str]] = {}
        for launch in device.launches:
            parts.setdefault(launch.name, set()).add(launch.part)
        assert parts["embedding"] == parts["embedding_dense_backward"] == {"embedding"}
        assert (
            parts["triton.activation_kernel"]
            == parts["triton.activation_backward_kernel"]
            == {"MLP"}
        )
        assert parts["triton.norm_kernel"] == parts["triton.norm_backward_kernel"] == {"norms"}
        assert parts["triton.forward_kernel"] == parts["triton.key_value_kernel"] == {"attention"}
        # What the backward pass needs: more than the inputs of both blocks' linear layers, less
        # than everything.
        states = 4 * 512 * 768 * 2
        assert 10 * states < device.saved < device.peak
