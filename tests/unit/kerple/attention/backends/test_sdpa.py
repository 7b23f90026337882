"""The sdpa backend against the reference, in float64. It shares the cases of low precision and
dropout with chunked.
"""

import pytest
import torch

from kerple.attention import attend
from kerple.attention.backends import sdpa
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
