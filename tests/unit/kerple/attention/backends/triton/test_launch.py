"""The fused backend as models use it: the gradients of methods, by tables or by jacobians, and what
it rejects.
"""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import Attention, Span, attend, runs_fused
from kerple.attention.backends.triton import launch
from kerple.positional import ModelShape, TableJacobian, build
from tests.support.attention import (
    attend_with,
    float64_arguments,
    random_attend_arguments,
    run_attend,
    upstream_gradient,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = ModelShape(num_heads=2, head_size=16, hidden_size=32, num_layers=1, max_positions=40)
# A sum of kernels, one with a jacobian, a bias and a weight, and a table.
# T5's last bucket begins at distance 14.
SHORT_T5 = {"num_buckets": 8, "max_distance": 20}


@pytest.fixture
def requested(monkeypatch) -> list[tuple[bool, int | None]]:
    """(whether coefficients have gradients, `dense` of a table's gradient or 0) for each backward
    pass.
    """
    requests: list[tuple[bool, int | None]] = []
    query_gradient, table_gradients = (
        launch.Launcher.query_gradient,
        launch.Launcher.table_gradients,
    )

    def record_query(launcher, grad_context, row_stats, directions, count, *, out):
        requests.append((directions is not None, 0))
        return query_gradient(launcher, grad_context, row_stats, directions, count, out=out)

    def record_tables(launcher, grad_context, row_stats, tables, dense):
        requests[-1] = (requests[-1][0], dense)
        return table_gradients(launcher, grad_context, row_stats, tables, dense)

    monkeypatch.setattr(launch.Launcher, "query_gradient", record_query)
    monkeypatch.setattr(launch.Launcher, "table_gradients", record_tables)
    return requests


@pytest.mark.parametrize(
    ("pos_emb", "options", "span"),
    [
        ("kerple_power_ap_ap", {}, Span(window=19)),
        ("rpe", SHORT_T5, Span(window=19)),
        ("rpe", SHORT_T5, Span(block=12)),
    ],
)
@pytest.mark.quick(2)
def test_windows_and_blocks_with_jacobians(pos_emb, options, span, requested):
    """Fewer queries than keys; a window that ends in T5's last bucket, blocks that
    begin before it.
    """
    torch.manual_seed(0)
    method = build(pos_emb, SHAPE, **options).to(DEVICE)
    states = [
        torch.randn(1, 2, length, 16, device=DEVICE).requires_grad_() for length in (37, 40, 40)
    ]
    leaves = [*states, *method.parameters()]
    grads = []
    for backend in ("fused", "reference"):
        assert runs_fused(method, backend, states[0], states[0].shape) == (backend == "fused")
        context = Attention(method, backend)(*states, window=span.window, block=span.block)
        grads.append(torch.autograd.grad(context.square().sum(), leaves))
    assert {coefficients for coefficients, _ in requested} == {True}
    assert {dense for _, dense in requested} == {14 if pos_emb == "rpe" else 0}
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("bias_directions", "weight_directions", "window", "kv_heads"),
    [(0, 2, 30, 2), (2, 2, None, 1), (3, 1, 30, 2)],
)
@pytest.mark.quick(2)
def test_gradients_of_coefficients(bias_directions, weight_directions, window, kv_heads):
    heads, length = 2, 40
    arguments = random_attend_arguments(
        1,
        heads,
        length,
        length,
        16,
        bias=bias_directions > 0,
        weight=weight_directions > 0,
        window=window,
        kv_heads=kv_heads,
        device=DEVICE,
    )
    max_kv_len = window or length
    generator = torch.Generator().manual_seed(1)
    # Longer than necessary, and of different lengths.
    directions = {
        "bias": torch.randn(heads, bias_directions, max_kv_len + 5, generator=generator).to(DEVICE),
        "weight": torch.randn(heads, weight_directions, max_kv_len + 3, generator=generator).to(
            DEVICE
        ),
    }
    grads = []
    for backend in ("fused", "fused", "reference"):
        inputs, coefficients = dict(arguments), []
        for name, table_directions in directions.items():
            if table_directions.shape[1]:
                values = torch.ones(table_directions.shape[:2], device=DEVICE).requires_grad_()
                change = ((values - 1)[:, :, None] * table_directions[..., :max_kv_len]).sum(1)
                inputs[f"{name}_table"] = arguments[f"{name}_table"].detach() + change
                inputs[f"{name}_jacobian"] = TableJacobian(values, table_directions)
                coefficients.append(values)
        result = attend_with(backend=backend, **inputs)
        grads.append(
            torch.autograd.grad(
                result, [arguments["query"], *coefficients], upstream_gradient(result)
            )
        )
    for first, second, expected in zip(*grads, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


def test_with_too_many_directions_the_table_gets_its_gradient():
    arguments = random_attend_arguments(1, 2, 40, 40, 16, weight=False, device=DEVICE)
    coefficients = torch.ones(2, 5, device=DEVICE).requires_grad_()
    jacobian = TableJacobian(coefficients, torch.zeros(2, 5, 40, device=DEVICE))
    result = attend_with(backend="fused", **arguments, bias_jacobian=jacobian)
    (grad,) = torch.autograd.grad(result.square().sum(), arguments["bias_table"], retain_graph=True)
    assert grad.abs().max() > 1e-3
    assert torch.autograd.grad(result.sum(), coefficients, allow_unused=True) == (None,)


def test_directions_below_dense_are_ignored():
    states = [torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3)]
    runs = []
    for below in (0.0, 1.0):
        table = torch.zeros(2, 40, device=DEVICE, requires_grad=True)
        coefficients = torch.zeros(2, 1, device=DEVICE, requires_grad=True)
        directions = torch.where(torch.arange(40, device=DEVICE) < 20, below, 1.0).expand(2, 1, -1)
        jacobian = TableJacobian(coefficients, directions, dense=20)
        context = attend_with(*states, bias_table=table, bias_jacobian=jacobian, backend="fused")
        runs.append(torch.autograd.grad(context.square().sum(), [coefficients, table]))
    for actual, expected in zip(*runs, strict=True):
        assert torch.equal(actual, expected)
        assert expected.abs().max() > 0


def test_views_of_one_projection_and_an_expanded_gradient():
    """The inputs of SelfAttention, without a copy; and an upstream gradient with zero strides."""
    qkv = (
        torch.randn(2, 40, 2, 48, generator=torch.Generator().manual_seed(0))
        .to(DEVICE)
        .requires_grad_()
    )
    actual, expected = (
        torch.autograd.grad(
            attend(
                *(part.transpose(1, 2) for part in states.split(16, dim=3)), backend=backend
            ).sum(),
            qkv,
        )[0]
        for backend, states in (("fused", qkv), ("reference", qkv.double()))
    )
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-4, atol=1e-5)


def test_a_single_input_may_require_a_gradient():
    arguments = random_attend_arguments(1, 1, 20, 20, 16, device=DEVICE)
    exact = run_attend("reference", float64_arguments(arguments))
    expected = dict(zip(["result", *arguments], exact, strict=False))
    for required in ("query", "key", "bias_table", "weight_table"):
        leaves = {
            name: leaf.detach().requires_grad_(name == required)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for name, leaf in arguments.items()
        }
        result = attend(backend="fused", **leaves)
        result.backward(upstream_gradient(result))
        torch.testing.assert_close(
            leaves[required].grad.double(), expected[required], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout_p": 0.1}, "'fused'"),
        (
            {"dtype": torch.float64},
            r"'fused'.*torch\.float32, torch\.bfloat16, torch\.float16.*torch\.float64",
        ),
        ({"size": 136}, "'fused'.*128.*136"),
        ({"batch": 65_536}, "'fused'.*65535.*65536"),
    ],
)
def test_unsupported_calls_are_rejected(change, message):
    shape = (change.get("batch", 1), 1, 4, change.get("size", 8))
    states = [torch.randn(shape, dtype=change.get("dtype", torch.float32))] * 3
    with pytest.raises(NotImplementedError, match=message):
        attend(*states, backend="fused", dropout_p=change.get("dropout_p", 0.0))
