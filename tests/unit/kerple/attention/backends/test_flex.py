"""FlexAttention as a backend, and score_mods of methods. On a CPU it has no backward pass."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kerple.attention import attend, score_mod, tables
from kerple.attention.backends import flex
from kerple.positional import KerpleLog, ModelShape, NoPositions, Rotary, build
from tests.support.attention import LargestStorage

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)
STATES = (torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 8, 8))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (128, 128), (100, 300)])
@pytest.mark.parametrize("method", ["none", "kerple_power_ap_ap"])
@torch.no_grad()
def test_values(method, s, t, window):
    torch.manual_seed(0)
    states = [torch.randn(2, 2, length, 16) for length in (s, t, t)]
    positional = build(method, ModelShape(2, 16, 32, 1, t))
    bias, weight = tables(positional, t if window is None else min(t, window), "cpu")
    actual = attend(*states, bias_table=bias, weight_table=weight, window=window, backend="flex")
    bias, weight = (None if table is None else table.double() for table in (bias, weight))
    exact = [tensor.double() for tensor in states]
    expected = attend(
        *exact, bias_table=bias, weight_table=weight, window=window, backend="reference"
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 129, 300])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s", "t"), [(1, 300), (128, 128), (100, 700), (513, 640)])
def test_block_masks_are_those_of_create_block_mask(s, t, window, causal):
    def visible(batch, head, query, key):
        distance = query + t - s - key if causal else (query - key).abs()
        return (distance >= 0) & (distance < (window or t))

    expected = create_block_mask(visible, None, None, s, t, device="cpu").as_tuple()
    mask = flex._block_mask(s, t, window, torch.device("cpu"), causal)
    for actual, tensor in zip(mask.as_tuple(), expected, strict=True):
        if isinstance(tensor, torch.Tensor):
            assert actual.dtype == tensor.dtype
            assert torch.equal(actual, tensor)
        elif not callable(tensor):
            assert actual == tensor


def test_masks_that_an_evaluation_caches_can_be_used_in_training():
    flex._block_mask.cache_clear()
    with torch.inference_mode():
        mask = flex._block_mask(300, 300, 50, torch.device("cpu"))
    assert not any(
        part.is_inference() for part in mask.as_tuple() if isinstance(part, torch.Tensor)
    )


def test_a_window_needs_no_matrix_of_queries_and_keys():
    """2^17 queries and keys, 2^10 blocks of each; a block of queries attends to at most 9 blocks of
    keys.
    """
    with LargestStorage() as largest:
        mask = flex._block_mask(2**17, 2**17, 1024, torch.device("cpu"))
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).max() == 9
    assert largest.elements <= 4 * (2**17 / 128) ** 2


@pytest.mark.ci
@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=2)
def test_calls_of_many_lengths_are_compiled_or_rejected(monkeypatch):
    """3 lengths exceed the limit of torch.compile, here 2, after which it runs functions
    uncompiled.
    """
    torch._dynamo.reset()
    flex._compiled_flex_attention.cache_clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    states = torch.randn(1, 1, 3, 4)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for length in range(1, 4):
        flex._run_compiled(*[states[:, :, :length]] * 3)
    assert graphs["unique_graphs"] == before + 3
    monkeypatch.setattr(flex, "MAX_KERNELS", 3)
    with pytest.raises(RuntimeError, match=r"'flex'.*3"):
        flex._run_compiled(*[states[:, :, :1].expand(2, -1, -1, -1)] * 3)
    flex._compiled_flex_attention.cache_clear()
    torch._dynamo.reset()


def test_unsupported_calls_are_rejected():
    states = [torch.randn(1, 1, 4, 8)] * 3
    with pytest.raises(NotImplementedError, match=r"'flex'.*CPU"):
        attend(states[0].requires_grad_(), *states[1:], backend="flex")
    with pytest.raises(NotImplementedError, match="'flex'"):
        attend(*states, dropout_p=0.5, backend="flex")


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power__ap", "kerple_power_ap_ap"])
@torch.no_grad()
def test_score_mod_in_flex_attention(name):
    torch.manual_seed(0)
    method, length, queries = build(name, SHAPE), 24, 5
    states = [torch.randn(2, 4, size, 8) for size in (queries, length, length)]
    offset = length - queries
    mask = create_block_mask(
        lambda b, h, q, k: q + offset >= k, None, None, queries, length, device="cpu", BLOCK_SIZE=8
    )
    modify = score_mod(method, *states[:2])
    actual = flex_attention(*states, score_mod=modify, block_mask=mask)
    torch.testing.assert_close(
        flex_attention(*states, score_mod=modify), actual
    )  # causal without a mask, too
    bias, weight = (
        None if table is None else table.double() for table in tables(method, length, "cpu")
    )
    exact = [tensor.double() for tensor in states]
    expected = attend(*exact, bias_table=bias, weight_table=weight, backend="reference")
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-5)
    without_positions = attend(*exact, backend="reference")
    assert (without_positions - expected).abs().max() > 1e-3


@torch.no_grad()
def test_score_mod_with_free_places_in_the_cache():
    torch.manual_seed(0)
    method = KerpleLog(4)
    query, key, value = (torch.randn(2, 4, size, 8) for size in (3, 16, 16))
    actual = flex_attention(query, key, value, score_mod=score_mod(method, query, key, offset=6))
    bias, _ = tables(method, 9, "cpu")
    torch.testing.assert_close(
        actual, attend(query, key[:, :, :9], value[:, :, :9], bias_table=bias)
    )


@torch.no_grad()
def test_score_mods_for_other_lengths_are_rejected_or_give_nan():
    method = KerpleLog(4)
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 8, 8)
    for offset in (-1, 6):
        with pytest.raises(ValueError, match=f"3 queries from position {offset} .* 8 keys"):
            score_mod(method, query, key, offset=offset)
    with pytest.raises(ValueError, match=r"8 queries .* 3 keys"):
        score_mod(method, key, query)
    for created, used in ((query, query.repeat(1, 1, 2, 1)), (query[:, :, :1], query[:, :, :1])):
        modify = score_mod(method, created, created)
        longer = torch.cat([created, query], dim=2)
        assert flex_attention(used, longer, longer, score_mod=modify).isnan().all(dim=-1).any()


@torch.no_grad()
def test_fewer_queries_than_a_score_mod_was_created_for_are_the_first():
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 8, 8)
    modify = score_mod(KerpleLog(4), query, key)
    expected = flex_attention(query, key, key, score_mod=modify)[:, :, :2]
    torch.testing.assert_close(
        flex_attention(query[:, :, :2], key, key, score_mod=modify), expected
    )


def test_methods_without_tables_have_no_score_mod():
    with pytest.raises(ValueError, match=r"Rotary .*rotate"):
        score_mod(Rotary(8), *STATES)
    with pytest.raises(ValueError, match="NoPositions"):
        score_mod(NoPositions(), *STATES)
    with pytest.raises(ValueError, match="modify_scores"):
        score_mod(build("dape", SHAPE), *STATES)


def test_a_score_mod_uses_the_current_parameters_and_has_gradients():
    method = KerpleLog(2)
    modify = score_mod(method, *STATES)
    batch, head, query, key = (torch.tensor(index) for index in (0, 1, 7, 2))
    value = modify(torch.zeros(()), batch, head, query, key)
    assert value == method.bias(torch.tensor([5.0]))[1, 0]
    value.backward()
    assert method.bias_p.grad[1] != 0
