"""The sdpa backend against the reference, in float64. It shares the cases of low precision and
dropout with chunked.
"""

from dataclasses import replace

import pytest
import torch

from kerple.attention import Span, attend
from kerple.attention.backends import sdpa
from kerple.attention.backends.reference import REFERENCE
from kerple.attention.backends.sdpa import cpu_kernel_forward, fits_cpu_kernel
from kerple.attention.call import AttentionCall
from kerple.attention.tables import PositionTables
from tests.support.attention import LargestStorage, attend_arguments, run_attend, run_repeated

SIZES = [
    (2, 1, 1),
    (2, 1, 40),
    (2, 100, 300),
    (1, 130, 131),
]


def assert_results_close(results, expected):
    """The results and gradients of two runs."""
    for one, other in zip(results, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("batch", "s", "t"), SIZES)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("method", ["none", "kerple_log"])
def test_values_and_gradients(method, batch, s, t, window):
    arguments = attend_arguments(method, batch, 3, s, t, 8, window=window)
    assert_results_close(run_attend("sdpa", arguments), run_attend("reference", arguments))


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (4, 1)])
@pytest.mark.parametrize(("s", "t", "window"), [(140, 150, 50), (1, 40, None)])
@pytest.mark.parametrize("method", ["none", "kerple_log"])
def test_grouped_queries(method, s, t, window, heads, kv_heads, supported, monkeypatch):
    """Also in several calls, as on a GPU where no kernel of PyTorch supports them."""
    monkeypatch.setattr(sdpa, "_supports_gqa", lambda query, attn_mask: supported)
    arguments = attend_arguments(method, 2, heads, s, t, 8, window=window, kv_heads=kv_heads)
    assert_results_close(run_attend("sdpa", arguments), run_repeated(arguments))


def test_grouped_keys_are_not_repeated():
    query, *others = (torch.randn(1, heads, 1024, 64, requires_grad=True) for heads in (8, 1, 1))
    with LargestStorage() as largest:
        context = attend(query, *others, backend="sdpa")
        context.sum().backward()
    assert largest.elements == query.numel()  # the context and the gradient of the query


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_memory_of_masks_is_bounded(window, with_bias):
    query = torch.randn(1, 2, 512, 8)
    key = torch.randn(1, 2, 16_384, 8)
    bias = None
    if with_bias:
        bias = -torch.rand(2, 16_384)
    with torch.no_grad(), LargestStorage() as largest:
        attend(query, key, key, bias_table=bias, window=window, backend="sdpa")
    # The pairs of 128 queries, as int64 where distances are looked up.
    visible = 16_384
    if window is not None:
        visible = window + 127
    assert largest.elements <= 2 * 128 * visible


# The forward pass of the chunked backend on a CPU.


def random_call(s: int, t: int, window: int | None, with_bias: bool) -> AttentionCall:
    """Two samples, and four heads that share two key/value heads. The first head hides each key
    from its own query, so the first query sees nothing.
    """
    torch.manual_seed(0)
    query = torch.randn(2, 4, s, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, t, 8, dtype=torch.float64)
    tables = PositionTables()
    if with_bias:
        bias = torch.randn(4, t, dtype=torch.float64)
        bias[0, 0] = float("-inf")
        tables = PositionTables(bias=bias)
    return AttentionCall(
        query=query, key=key, value=value, scale=0.3, tables=tables, span=Span(window)
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("s", "t", "window"), [(1, 1, None), (600, 600, None), (600, 600, 70), (300, 700, 500)]
)
def test_equals_the_reference(s, t, window, with_bias):
    call = random_call(s, t, window, with_bias)
    assert fits_cpu_kernel(call)
    torch.testing.assert_close(
        cpu_kernel_forward(call), REFERENCE.compute(call), rtol=1e-9, atol=1e-11
    )


def test_calls_that_do_not_fit():
    call = random_call(9, 9, None, True)
    weighted = PositionTables(weight=torch.rand(4, 9))
    for other in (
        replace(call, dropout_p=0.1),
        replace(call, tables=weighted),
        replace(call, value=call.value[..., :4]),
    ):
        assert not fits_cpu_kernel(other)
