"""The operators of the fused backend: `torch.library.opcheck`, the gradients' memory, and compilation in one graph."""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import attend
from kerple.attention.backends.triton import operator
from tests.support.attention import random_attend_arguments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operator_arguments(
    s: int = 20, t: int = 20, window: int | None = None, kv_heads: int = 2, decay: bool = False
) -> list[object]:
    arguments = random_attend_arguments(1, 2, s, t, 16, decay=decay, window=window, kv_heads=kv_heads, device=DEVICE)
    states = [arguments[name] for name in ("query", "key", "value", "bias_table", "weight_table")]
    coefficients = torch.randn(2, 1, device=DEVICE, requires_grad=True)
    directions = torch.randn(2, 1, t, device=DEVICE)
    return [*states, coefficients, None, directions, None, arguments.get("decay_sums"), 4, None, 0.3, window]


@pytest.mark.parametrize(
    ("s", "t", "window", "kv_heads", "decay"),
    [(20, 20, None, 2, False), (9, 20, 5, 2, True), (20, 20, None, 1, False)],
)
def test_opcheck(s, t, window, kv_heads, decay):
    """Schema, fake implementation and autograd formula agree with the implementation."""
    torch.library.opcheck(
        operator._attention,
        tuple(operator_arguments(s, t, window, kv_heads, decay)),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_gradients_of_equally_many_queries_and_keys_share_their_memory():
    """In the layout of a model's projection, `[b, s, h, 3, d]`."""
    query, key, value, *rest = operator_arguments()
    context, _ = operator._attention(query, key, value, *rest)
    grads = torch.autograd.grad(context.sum(), (query, key, value))
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert [grad.storage_offset() for grad in grads] == [0, 16, 32]
    assert {grad.stride() for grad in grads} == {(20 * 2 * 3 * 16, 3 * 16, 2 * 3 * 16, 1)}


def test_no_output_needs_a_gradient():
    """`lse` has no gradient; a backward pass through it alone gives None."""
    arguments = operator_arguments()
    _, lse = operator._attention(*arguments)
    assert torch.autograd.grad(lse.sum(), arguments[0], allow_unused=True) == (None,)


def test_attention_is_one_graph():
    def run(query, key, value, bias_table):
        return attend(query, key, value, bias_table=bias_table, backend="fused")

    arguments = random_attend_arguments(1, 2, 20, 20, 16, bias=True, weight=False, device=DEVICE)
    inputs = [arguments[name] for name in ("query", "key", "value", "bias_table")]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(gradients(compiled, inputs), gradients(run, inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def gradients(function, inputs):
    context = function(*inputs)
    return [context, *torch.autograd.grad(context.square().sum(), inputs)]
