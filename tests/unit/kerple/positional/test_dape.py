"""DAPE against the paper's formulas, pair by pair in float64: values, gradients, and the number of parameters."""

import math

import pytest
import torch

from kerple.positional import Chunk, Dape, DapeAlibi, DapeFire, DapeKerple, DapeRotary, ModelShape, Rotary, build
from tests.support.attention import assert_is_formula
from tests.support.dape_release import load_release
from tests.unit.kerple.positional.test_fire import fire_bias

HEADS, SIZE = 3, 4


def mlp(method, pairs: torch.Tensor) -> torch.Tensor:
    """Linear, LeakyReLU(0.01), Linear over the last dimension."""
    hidden = pairs @ method.first.weight.T + method.first.bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return hidden @ method.second.weight.T + method.second.bias


def static_bias(method, length: int) -> torch.Tensor:
    """`[h, t, t]`, by the formulas of their papers."""
    position = torch.arange(length, dtype=torch.float64)
    distance = (position[:, None] - position).clamp(min=0)
    if isinstance(method, DapeKerple):
        p, a = method.static.bias_p, method.static.bias_a
        return -p * torch.log1p(a * distance)
    if isinstance(method, DapeAlibi):
        return -torch.tensor([[[2**-4]], [[2**-8]], [[2**-2]]], dtype=torch.float64) * distance
    return fire_bias(method.static, length, lambda x: torch.where(x > 0, x, 0.01 * x))


def formula(method):
    def scores(query, key, visible):
        products = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
        last = products.movedim(1, -1)
        if isinstance(method, Dape):
            return products + mlp(method, last).movedim(-1, 1)
        bias = static_bias(method, key.shape[2])
        biases = bias.expand_as(products).movedim(1, -1)
        if method.variant == "Add_Residual":
            return products + bias + mlp(method, last + biases).movedim(-1, 1)
        adapted = products + mlp(method, torch.cat((last, biases), dim=-1)).movedim(-1, 1)
        return adapted if method.variant == "Concat" else adapted + bias

    return scores


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("cls", "variant"),
    [
        (Dape, None),
        (DapeKerple, "Concat_Residual"),
        (DapeAlibi, "Concat_Residual"),
        (DapeAlibi, "Concat"),
        (DapeAlibi, "Add_Residual"),
        (DapeFire, "Concat_Residual"),
    ],
)
def test_values_and_gradients(cls, variant):
    torch.manual_seed(0)
    method = (cls(HEADS) if variant is None else cls(HEADS, variant=variant)).double()
    assert_is_formula(method, formula(method), HEADS, SIZE, atol=3e-6 if cls is DapeKerple else 1e-10)


@pytest.mark.parametrize("name", ["dape", "dape_kerple", "dape_alibi", "dape_fire", "fire"])
def test_released_module(name):
    """The final scores that the authors' module computes from the same parameters and scores."""
    method, scores, final = load_release(name)
    position = torch.arange(scores.shape[-1])
    mask = position > position[:, None]
    table = method.table(position.float())
    actual = method.modify_scores(Chunk(scores, None, position, position, mask, table))
    torch.testing.assert_close(actual.masked_fill(mask, 0.0), final, rtol=0, atol=1e-5)


def test_rotary_scores():
    """`dape_rotary` is `dape` on the scores of rotated queries and keys."""
    torch.manual_seed(0)
    method = DapeRotary(HEADS, SIZE, fraction=0.5, base=100.0).double()
    rotary = Rotary(SIZE, fraction=0.5, base=100.0)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        query, key = rotary.rotate(query, key, position, position)
        products = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
        return products + mlp(method, products.movedim(1, -1)).movedim(-1, 1)

    assert_is_formula(method, scores, HEADS, SIZE)


def test_both_inputs_of_the_mlp_get_gradients():
    """The scores through the queries, the bias through the kernel's parameters."""
    torch.manual_seed(0)
    method = DapeKerple(HEADS, variant="Concat").double()  # the bias enters only through the MLP
    scores = torch.randn(1, HEADS, 4, 4, dtype=torch.float64, requires_grad=True)
    position = torch.arange(4)
    mask = position > position[:, None]
    table = method.table(torch.arange(4.0))
    (method.modify_scores(Chunk(scores, None, position, position, mask, table)) - scores).square().sum().backward()
    assert (scores.grad != 0).all()
    assert (method.static.bias_p.grad != 0).all()
    assert (method.static.bias_a.grad != 0).all()


def test_initial_weights_are_those_of_nn_linear():
    method = DapeAlibi(500, mlp_width=400)
    method.reset_parameters(torch.Generator().manual_seed(1))
    cast = DapeAlibi(500, mlp_width=400).bfloat16()
    cast.reset_parameters(torch.Generator().manual_seed(1))
    for layer, inputs in ((method.first, 1000), (method.second, 400)):
        for parameter in (layer.weight, layer.bias):
            assert parameter.abs().max() <= inputs**-0.5
            assert parameter.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.05)
    for parameter, cast_parameter in zip(method.parameters(), cast.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), cast_parameter)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "concat"}, "variant 'concat'.*Concat_Residual, Concat, Add_Residual"),
        ({"mlp_width": 0}, "mlp_width 0: DAPE's MLP"),
        ({"width": 3}, "DapeKerple.*'width'.*mlp_width"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        build("dape_kerple", ModelShape(2, 4, 8, 1, 16), **options)
