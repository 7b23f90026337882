"""Angles, and values over distance for the pairs of a chunk."""

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kerple.attention import Attention
from kerple.positional import ModelShape, XPos, build
from kerple.positional.functional import (
    Angles,
    DeviceConstant,
    LatestResults,
    by_distance,
    by_pair,
    cast_together,
    default_frequencies,
    positions_on,
)


def test_angles_are_exact_at_far_positions():
    positions = torch.tensor([0, 3, 65_535])
    cosines, sines = Angles(6, 10_000.0, scale=2.0)(positions, torch.device("cpu"))
    for row, position in enumerate(positions.tolist()):
        angles = [position * frequency for frequency in default_frequencies(6, 10_000.0)]
        assert cosines[row].tolist() == pytest.approx(
            [2 * math.cos(angle) for angle in angles], abs=1e-6
        )
        assert sines[row].tolist() == pytest.approx(
            [2 * math.sin(angle) for angle in angles], abs=1e-6
        )


def test_angles_with_other_frequencies():
    cosines, _ = Angles(4, 10_000.0, frequencies=(0.5, 0.25))(
        torch.tensor([2]), torch.device("cpu")
    )
    assert cosines[0].tolist() == pytest.approx([math.cos(1.0), math.cos(0.5)])


def test_the_latest_angles_are_cached_by_value():
    angles, cpu = Angles(4, 10_000.0), torch.device("cpu")
    first = angles(torch.arange(5), cpu)
    assert angles(torch.arange(5), cpu) is first
    for start in range(1, 1 + LatestResults.SIZE):
        angles(torch.arange(start, start + 5), cpu)
    assert angles(torch.arange(5), cpu) is not first
    xpos, positions, ones = XPos(2), torch.arange(3), torch.ones(3, 2)
    for _ in range(2):
        xpos.scale_qk(ones, ones, positions, positions)
    assert len(xpos._cache.entries) == 1


def cached_tensors() -> Callable[[], list[torch.Tensor]]:
    constant, angles, cpu = DeviceConstant((1.0, 0.5)), Angles(4, 10_000.0), torch.device("cpu")
    xpos = XPos(2)

    def compute() -> list[torch.Tensor]:
        positions, ones = torch.arange(3), torch.ones(3, 2, requires_grad=True)
        return [
            constant(cpu),
            *angles(positions, cpu),
            *xpos.scale_qk(ones, ones, positions, positions),
        ]

    return compute


@pytest.mark.parametrize("fake_first", [True, False])
def test_fake_tensors_are_not_cached(fake_first):
    compute, expected = cached_tensors(), cached_tensors()()
    if not fake_first:
        compute()
    with FakeTensorMode():
        assert [(tensor * torch.ones(2)).shape for tensor in compute()] == [(2,), *[(3, 2)] * 4]
    for actual, tensor in zip(compute(), expected, strict=True):
        assert torch.equal(actual, tensor)


def test_tensors_of_transformed_functions_are_not_cached():
    """Their memory is not accessible after the transformation, for example to kernels."""
    compute = cached_tensors()
    torch.func.grad(lambda states: states.sum() + len(compute()))(torch.ones(2))
    assert [tensor.untyped_storage().nbytes() for tensor in compute()] == [8, 24, 24, 24, 24]


def test_tensors_that_an_evaluation_cached_can_be_used_in_training():
    compute, leaf = cached_tensors(), torch.ones((), requires_grad=True)
    with torch.inference_mode():
        compute()
    sum((tensor * leaf).sum() for tensor in compute()).backward()
    assert leaf.grad.isfinite()


def test_constants_are_traced_in_one_graph():
    constant = DeviceConstant((1.0, 0.5))
    compiled = torch.compile(
        lambda states: states * constant(states.device), fullgraph=True, backend="eager"
    )
    assert compiled(torch.ones(2)).tolist() == compiled(torch.ones(2)).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    "positions", [torch.arange(3, 9), torch.tensor([4, 4, 1]), torch.arange(0)]
)
def test_positions_on_another_device(positions):
    moved = positions_on(positions, torch.device("meta"))
    assert moved.shape == positions.shape
    assert moved.device.type == "meta"
    assert torch.equal(
        positions_on(positions, torch.device("cpu"), torch.float32), positions.float()
    )


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((0, 5), (0, 5)), ((3, 6), (0, 6)), ((7, 9), (4, 9)), ((4, 5), (0, 5)), ((2, 4), (0, 8))],
)
def test_by_pair_looks_up_the_distance_of_every_pair(queries, keys):
    """Zero for keys after the query, and for distances beyond the table of 6."""
    table = torch.arange(1.0, 7.0).expand(2, 6).clone().requires_grad_()
    query_positions, key_positions = torch.arange(*queries), torch.arange(*keys)
    values = by_pair(table, query_positions, key_positions)
    distance = query_positions[:, None] - key_positions
    inside = (distance >= 0) & (distance < 6)
    expected = torch.where(inside, distance + 1.0, 0.0)
    assert torch.equal(values, expected.expand(2, -1, -1))
    values.sum().backward()
    counts = distance[inside].bincount(minlength=6)
    assert torch.equal(table.grad, counts.float().expand(2, -1))
    # The line that the pairs are views of: from the farthest distance to the nearest.
    line = by_distance(table, query_positions, key_positions)
    assert torch.equal(line[:, : len(key_positions)], values[:, -1])


def test_tensors_are_cast_together():
    tensors = [
        torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True),
        torch.ones(1, requires_grad=True),
    ]
    results = cast_together(tensors, torch.float64)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result, tensor.double())
    (results[0].sum() + 3 * results[1].sum()).backward()
    assert [tensor.grad.unique().tolist() for tensor in tensors] == [[1.0], [3.0]]
    same = [torch.ones(2), torch.ones(1)]
    assert cast_together(same, torch.float32) is same


@pytest.mark.parametrize("name", ["dape_kerple", "dape_v2_kerple", "fire", "transformer_xl"])
def test_transposed_queries_are_recognized(name):
    method = build(name, ModelShape(4, 8, 32, 1, 16))
    states = torch.randn(1, 10, 4, 8)
    with pytest.raises(ValueError, match=r"4 heads.*transpose\(1, 2\)"):
        Attention(method)(states, states, states)
