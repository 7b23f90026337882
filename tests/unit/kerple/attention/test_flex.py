"""FlexAttention as a backend against the reference, forward: on a CPU it has no backward pass."""

import pytest
import torch

from kerple.attention import attend, tables
from kerple.positional import ModelShape, build


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (7, 7), (128, 128), (100, 513)])
@pytest.mark.parametrize("method", ["none", "alibi", "kerple_log", "kerple_power__ap", "kerple_power_ap_ap", "rpe"])
def test_values(method, s, t, window):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 16) for length in (s, t, t))
    with torch.no_grad():
        positional = build(method, ModelShape(2, 16, 32, 1, t))
        bias, weight = tables(positional, t if window is None else min(t, window), "cpu")
        found = attend(query, key, value, bias_table=bias, weight_table=weight, window=window, backend="flex")
        expected = attend(
            *(states.double() for states in (query, key, value)),
            bias_table=None if bias is None else bias.double(),
            weight_table=None if weight is None else weight.double(),
            window=window,
            backend="reference",
        )
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_what_it_cannot_serve_is_refused_by_name():
    states = [torch.randn(1, 1, 4, 8)] * 3
    with pytest.raises(NotImplementedError, match="'flex' cannot compute gradients on a CPU"):
        attend(states[0].requires_grad_(), *states[1:], backend="flex")
    with pytest.raises(NotImplementedError, match="'flex' does not support attention dropout"):
        attend(*states, dropout_p=0.5, backend="flex")
