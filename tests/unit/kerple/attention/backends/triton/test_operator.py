"""The operators of the fused backend: `torch.library.opcheck`, the gradients' memory, and
compilation in one graph.
"""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import Documents, PositionTables, Span, attend, jacobians, tables
from kerple.attention.backends.triton import operator
from kerple.attention.backends.triton.launch import document_tiles
from kerple.positional import KerpleLog, TableJacobian
from tests.support.attention import attend_with, random_attend_arguments, run_attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operator_arguments(
    s: int = 20,
    t: int = 20,
    window: int | None = None,
    kv_heads: int = 2,
    decay: bool = False,
    bias_directions: int = 1,
    weight_directions: int = 0,
    documents: bool = False,
) -> list[object]:
    arguments = random_attend_arguments(
        1, 2, s, t, 16, decay=decay, window=window, kv_heads=kv_heads, device=DEVICE
    )
    jacobians = []
    for count in (bias_directions, weight_directions):
        coefficients = torch.randn(2, count, device=DEVICE, requires_grad=True)
        jacobians.append(
            TableJacobian(coefficients, torch.randn(2, count, t, device=DEVICE), dense=4)
            if count
            else None
        )
    bias, weight = arguments.get("bias_table"), arguments.get("weight_table")
    tables = PositionTables(
        bias=bias, weight=weight, bias_jacobian=jacobians[0], weight_jacobian=jacobians[1]
    )
    kernel = operator.prepare_tables(tables, 2, Span(window).max_kv_len(t), DEVICE).kernel
    states = [arguments[name] for name in ("query", "key", "value")]
    ids = (torch.arange(t, device=DEVICE) // 8)[None]
    tiles = list(document_tiles(Documents(ids))) if documents else []
    return [*states, *kernel, arguments.get("decay_sums"), tiles, 0.3, window]


@pytest.mark.parametrize(
    "arguments",
    [
        (20, 20, None, 1, False, 2, 2),
        (20, 20, 5, 1, True, 1, 0, True),
    ],
)
@pytest.mark.quick(1)
def test_opcheck(arguments):
    """Schema, fake implementation and autograd formula agree with the implementation, strides
    included.
    """
    torch.library.opcheck(
        operator._attention,
        tuple(operator_arguments(*arguments)),
        test_utils=(
            "test_schema",
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_static",
        ),
    )


def test_gradients_of_equally_many_queries_and_keys_share_their_memory():
    """In the layout of a model's projection, `[b, s, h, 3, d]`."""
    query, key, value, *rest = operator_arguments()
    context, _ = operator._attention(query, key, value, *rest)
    grads = torch.autograd.grad(context.sum(), (query, key, value))
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert [grad.storage_offset() for grad in grads] == [0, 16, 32]
    assert {grad.stride() for grad in grads} == {(20 * 2 * 3 * 16, 3 * 16, 2 * 3 * 16, 1)}


@pytest.mark.parametrize(("s", "decay"), [(7, False), (20, False), (20, True)])
@pytest.mark.quick(1)
def test_documents(s, decay):
    """Values and gradients, of complete rows and with a KV cache."""
    arguments = random_attend_arguments(
        2, 2, s, 20, 16, weight=not decay, decay=decay, kv_heads=1, device=DEVICE
    )
    arguments = {name: value for name, value in arguments.items() if value is not None}
    ids = torch.tensor([[0] * 6 + [1] * 14, [4] * 9 + [5] * 6 + [6] * 5], device=DEVICE)
    actual, expected = (
        run_attend(backend, arguments, document_ids=ids) for backend in ("fused", "reference")
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_are_far_apart():
    """Row 33 is 33 * 2^26 elements from the first, beyond int32. Most of the memory is never
    touched.
    """
    storage = torch.empty(33 * 2**26 + 16, dtype=torch.float16, device=DEVICE)
    states = storage.as_strided((1, 1, 34, 16), (1, 1, 2**26, 1)).copy_(torch.randn(1, 1, 34, 16))
    arguments = {"backend": "fused", "bias_table": torch.randn(1, 34, device=DEVICE)}
    expected = attend(states.contiguous(), states.contiguous(), states.contiguous(), **arguments)
    assert torch.equal(attend(states, states, states, **arguments), expected)


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


@pytest.mark.slow
def test_inductor_compiles_the_backward_pass_of_two_directions():
    method = KerpleLog(num_heads=2).to(DEVICE)

    def run(query, key, value, *_):
        bias, _ = tables(method, 20, query.device)
        bias_jacobian, _ = jacobians(method, 20, query.device)
        return attend_with(
            query, key, value, bias_table=bias, bias_jacobian=bias_jacobian, backend="fused"
        )

    arguments = random_attend_arguments(1, 2, 20, 20, 16, bias=False, weight=False, device=DEVICE)
    inputs = [*(arguments[name] for name in ("query", "key", "value")), *method.parameters()]
    compiled = torch.compile(run, fullgraph=True)
    for actual, expected in zip(gradients(compiled, inputs), gradients(run, inputs), strict=True):
        torch.testing.assert_close(actual, expected)


def gradients(function, inputs):
    context = function(*inputs)
    return [context, *torch.autograd.grad(context.square().sum(), inputs)]
