"""The fused kernels where models and `Attention` use them: by jacobians, against the chunks of another backend."""

import pytest
import torch

from kerple.attention import Attention, Span, jacobians, tables
from kerple.attention.backends.triton import launch as fused
from kerple.positional import ModelShape, build
from kerple.positional.base import TableJacobian
from tests.support.language_models import random_tokens, small_gpt

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, HEADS, SIZE = 40, 2, 8
# T5's last bucket begins at distance 17.
NEAR = {"num_buckets": 8, "max_distance": 20}


@pytest.fixture
def asked_for(monkeypatch) -> list[bool]:
    """For each pass of the query's gradient, whether numbers' gradients were asked of it; of a whole table's gradient
    nothing is asked but for T5's distances before the last bucket.
    """
    asked: list[bool] = []
    of_query, of_tables = fused._Launcher.query_gradient, fused._Launcher.table_gradients

    def query_gradient(call, upstream, pairs, *directions):
        asked.append(any(each is not None for each in directions))
        return of_query(call, upstream, pairs, *directions)

    def table_gradients(call, upstream, pairs, of_bias, of_weight, dense):
        assert dense is not None
        return of_tables(call, upstream, pairs, of_bias, of_weight, dense)

    monkeypatch.setattr(fused._Launcher, "query_gradient", query_gradient)
    monkeypatch.setattr(fused._Launcher, "table_gradients", table_gradients)
    return asked


@pytest.mark.parametrize(
    ("pos_emb", "options", "checkpoint_every"),
    [
        ("kerple_log", {}, 0),
        ("kerple_log", {"parameters": "per-layer"}, 1),
        ("kerple_power_ap_ap", {}, 1),
        ("rpe", NEAR, 0),
    ],
)
def test_a_model_has_the_same_loss_and_gradients(pos_emb, options, checkpoint_every, asked_for):
    tokens = random_tokens(LENGTH + 1)[None].to(DEVICE)
    runs = []
    for backend in ("fused", "chunked"):
        model = small_gpt(
            pos_emb,
            hidden_size=HEADS * SIZE,
            num_heads=HEADS,
            attention_backend=backend,
            pos_emb_options=tuple(options.items()),
        )
        torch.manual_seed(0)
        for method in model.positional_methods().values():
            method.reset_parameters()
        model.checkpoint_every = checkpoint_every
        loss = model.to(DEVICE).train().loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        runs.append({"loss": loss.detach(), **{name: one.grad for name, one in model.named_parameters()}})
    assert asked_for == [True, True]
    assert sum("rpe" in name for name in runs[0]) == {"kerple_log": 2, "kerple_power_ap_ap": 4, "rpe": 1}[pos_emb] * (
        2 if "parameters" in options else 1
    )
    for name, expected in runs[1].items():
        assert expected.abs().max() > 1e-7, name
        torch.testing.assert_close(
            runs[0][name], expected, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("span", [Span(window=19), Span(block=12)])
@pytest.mark.parametrize(("pos_emb", "options"), [("kerple_power_ap_ap", {}), ("rpe", NEAR)])
def test_windows_and_blocks_have_the_same_gradients(pos_emb, options, span, asked_for):
    """Queries that are the last of the positions; a window that ends in T5's last bucket, blocks that begin before."""
    torch.manual_seed(0)
    method = build(pos_emb, ModelShape(HEADS, SIZE, HEADS * SIZE, 1, LENGTH), **options).to(DEVICE)
    states = [torch.randn(1, HEADS, length, SIZE, device=DEVICE) for length in (LENGTH - 3, LENGTH, LENGTH)]
    leaves = [*(each.requires_grad_() for each in states), *method.parameters()]
    max_kv_len = span.max_kv_len(LENGTH)
    gradients = []
    for backend in ("fused", "reference"):
        attention = Attention(backend, method)
        assert attention.uses_jacobians(states[0].device, states[0].dtype, states[0].shape) == (backend == "fused")
        bias, weight = tables(method, max_kv_len, DEVICE)
        changes = dict(zip(("bias_jacobian", "weight_jacobian"), jacobians(method, max_kv_len, DEVICE), strict=True))
        context = attention(
            *states, bias_table=bias, weight_table=weight, **changes, window=span.window, block=span.block
        )
        gradients.append(torch.autograd.grad(context.square().sum(), leaves))
    assert all(asked_for)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_what_a_differential_says_below_dense_is_not_read():
    states = [torch.randn(1, HEADS, LENGTH, SIZE, device=DEVICE) for _ in range(3)]
    found = []
    for below in (0.0, 1.0):
        table = torch.zeros(HEADS, LENGTH, device=DEVICE, requires_grad=True)
        numbers = torch.zeros(HEADS, 1, device=DEVICE, requires_grad=True)
        directions = torch.where(torch.arange(LENGTH, device=DEVICE) < 20, below, 1.0).expand(HEADS, 1, -1)
        context = Attention("fused", build("alibi", ModelShape(HEADS, SIZE, HEADS * SIZE, 1, LENGTH)))(
            *states, bias_table=table, bias_jacobian=TableJacobian(numbers, directions, dense=20)
        )
        found.append(torch.autograd.grad(context.square().sum(), [numbers, table]))
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
        assert wanted.abs().max() > 0


def test_a_differential_of_another_shape_is_refused():
    states = [torch.randn(1, HEADS, LENGTH, SIZE)] * 3
    for shape in ((HEADS, 1, LENGTH - 1), (HEADS, 2, LENGTH), (1, 1, LENGTH)):
        short = TableJacobian(torch.ones(HEADS, 1), torch.ones(shape))
        with pytest.raises(ValueError, match=r"bias_jacobian .* must be \[2, p\] and \[2, p, at least 40\]"):
            Attention("fused", build("alibi", ModelShape(HEADS, SIZE, HEADS * SIZE, 1, LENGTH)))(
                *states, bias_table=torch.zeros(HEADS, LENGTH), bias_jacobian=short
            )
