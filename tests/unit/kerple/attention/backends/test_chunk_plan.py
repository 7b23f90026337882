"""How calls are divided into chunks, and tables as views of a chunk's pairs."""

import pytest
import torch

from kerple.attention import Span
from kerple.attention.backends import chunk_plan
from kerple.attention.backends.chunk_plan import ChunkPlan, ToeplitzTable
from kerple.attention.call import AttentionCall


def plan_for(
    batch: int, heads: int, s: int, t: int, window: int | None = None, kv_heads: int | None = None
) -> ChunkPlan:
    query, key = torch.zeros(batch, heads, s, 4), torch.zeros(batch, kv_heads or heads, t, 4)
    return ChunkPlan.for_call(
        AttentionCall(query=query, key=key, value=key, scale=1.0, span=Span(window))
    )


@pytest.mark.parametrize(
    ("budget", "merges_samples", "group_size"),
    [(1, False, 1), (2 * 35 * 90 * 4, False, 2), (2**22, True, 12)],
)
def test_groups_follow_the_memory_budget(budget, merges_samples, group_size, monkeypatch):
    monkeypatch.setattr(chunk_plan, "CPU_BYTES_PER_THREAD", budget)
    monkeypatch.setattr(chunk_plan, "MIN_ROWS", 16)
    plan = plan_for(3, 4, 70, 90)
    assert (plan.rows, plan.merges_samples, plan.group_size) == (35, merges_samples, group_size)
    states = torch.arange(3 * 4 * 90.0).view(3, 4, 90, 1)
    groups = plan.split(states)
    assert torch.equal(torch.cat(groups), states.flatten(0, 1))
    assert len(groups) == len(plan.first_heads())
    for head, group in zip(plan.first_heads(), groups, strict=True):
        assert torch.equal(group[0], states[:, head][(group[0, 0, 0] // 360).long()])


@pytest.mark.parametrize(
    ("budget", "group_size"), [(1, 1), (4, 3), (6, 6), (7, 6), (12, 12), (10**6, 24)]
)
def test_groups_use_whole_key_value_heads_or_parts_of_one(budget, group_size, monkeypatch):
    """12 query heads share 2 key/value heads; the budget is in units of a head's scores."""
    monkeypatch.setattr(chunk_plan, "CPU_BYTES_PER_THREAD", budget * 64 * 64 * 4)
    plan = plan_for(2, 12, 64, 64, kv_heads=2)
    assert plan.group_size == group_size
    heads = torch.arange(2 * 12.0).view(2, 12, 1, 1)
    kv_heads = torch.arange(2 * 2.0).view(2, 2, 1, 1)
    for group, kv_group in zip(plan.split(heads), plan.split_kv(kv_heads), strict=True):
        assert torch.equal((group.flatten() // 6).unique(), kv_group.flatten())


@pytest.mark.parametrize("window", [None, 30])
def test_chunks_cover_all_visible_pairs(window):
    plan = plan_for(1, 1, 300, 400, window)
    rows = [
        query
        for chunk in plan.chunks
        for query in range(chunk.first_query, chunk.first_query + chunk.rows)
    ]
    assert sorted(rows) == list(range(300))
    for chunk in plan.chunks:
        position = 100 + chunk.first_query
        assert chunk.first_key == Span(window).first_key(position)
        assert chunk.first_key + chunk.keys == position + chunk.rows
    assert plan.max_chunk_keys == max(chunk.keys for chunk in plan.chunks)


def test_a_toeplitz_table_has_the_values_of_a_chunk_s_pairs(monkeypatch):
    monkeypatch.setattr(chunk_plan, "MIN_ROWS", 2)
    plan = plan_for(1, 2, 5, 9, window=4)
    like = torch.zeros(0)
    table = torch.arange(8.0).view(2, 4)
    toeplitz = ToeplitzTable(plan, 2, float("-inf"), like)
    toeplitz.load(table)
    assert torch.equal(toeplitz.to_table(6), torch.cat((table, torch.zeros(2, 2)), dim=1))
    sums = ToeplitzTable(plan, 2, 0.0, like)
    expected_sums = torch.zeros(2, 4)
    for chunk in plan.chunks:
        _, values = toeplitz.align(0, torch.zeros(2, chunk.rows, chunk.keys))
        gradient = torch.randn(2, chunk.rows, chunk.keys)
        for row in range(chunk.rows):
            position = 4 + chunk.first_query + chunk.rows - 1 - row  # reversed
            for column in range(chunk.keys):
                distance = position - chunk.first_key - column
                if 0 <= distance < 4:
                    assert torch.equal(values[:, row, column], table[:, distance])
                    expected_sums[:, distance] += gradient[:, row, column]
                else:
                    assert (values[:, row, column] == float("-inf")).all()
                    gradient[:, row, column] = 0.0
        sums.add_gradient(0, gradient)
    torch.testing.assert_close(sums.to_table(4), expected_sums)
