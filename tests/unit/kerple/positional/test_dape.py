"""Both versions of DAPE against the formulas of the papers, pair by pair in float64: values and gradients."""

import math

import pytest
import torch

from kerple.positional import (
    Chunk,
    Dape,
    DapeAlibi,
    DapeFire,
    DapeKerple,
    DapeRotary,
    DapeV2,
    DapeV2Alibi,
    DapeV2Fire,
    DapeV2Kerple,
    DapeV2Rotary,
    ModelShape,
    Rotary,
    build,
)
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
    if isinstance(method, DapeKerple | DapeV2Kerple):
        p, a = method.static.bias_p, method.static.bias_a
        return -p * torch.log1p(a * distance)
    if isinstance(method, DapeAlibi | DapeV2Alibi):
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


def convolved(layer, inputs: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """`[b, i, t, t]`: the key at j gets the sum over the valid inputs at j - k // 2 ... j + k // 2, each multiplied by
    its own matrix.
    """
    inputs = torch.where(valid, inputs, 0.0)
    radius = layer.weight.shape[-1] // 2
    padded = torch.nn.functional.pad(inputs, (radius, radius))
    keys = inputs.shape[-1]
    return layer.bias[:, None, None] + sum(
        torch.einsum("oi,bist->bost", matrix, padded[..., shift : shift + keys])
        for shift, matrix in enumerate(layer.weight[:, :, 0].unbind(-1))
    )


def convolution_formula(method):
    def scores(query, key, visible):
        length = key.shape[2]
        # Later keys, which are masked, so that the hidden units after the last query exist for all queries.
        later = method.lookahead
        visible = torch.nn.functional.pad(visible, (0, later))
        earlier = ~visible & (torch.arange(length + later) < torch.arange(length)[:, None])
        products = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
        inputs, residual = products, products
        if method.static is not None:
            bias = static_bias(method, key.shape[2]).expand_as(products)
            if method.variant == "Add_Residual":
                inputs, residual = products + bias, products + bias
            else:
                inputs = torch.cat((products, bias), dim=1)
                residual = products if method.variant == "Concat" else products + bias
        inputs = torch.nn.functional.pad(inputs, (0, later))
        hidden = torch.nn.functional.leaky_relu(convolved(method.first, inputs, visible), 0.01)
        return residual + convolved(method.second, hidden, ~earlier)[..., :length]

    return scores


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("cls", "variant"),
    [
        (DapeV2, None),
        (DapeV2Alibi, "Concat_Residual"),
        (DapeV2Alibi, "Concat"),
        (DapeV2Alibi, "Add_Residual"),
        (DapeV2Kerple, "Concat_Residual"),
        (DapeV2Fire, "Concat_Residual"),
    ],
)
@pytest.mark.parametrize("kernel_size", [3, 5])
def test_values_and_gradients_of_version_2(cls, variant, kernel_size):
    torch.manual_seed(0)
    options = {"kernel_size": kernel_size} if variant is None else {"kernel_size": kernel_size, "variant": variant}
    method = cls(HEADS, **options).double()
    assert_is_formula(method, convolution_formula(method), HEADS, SIZE, atol=3e-6 if cls is DapeV2Kerple else 1e-10)


@pytest.mark.parametrize(
    "name",
    ["dape_v2_kerple", "dape_v2_alibi", "dape_v2_fire", "dape_v2_kerple_kernel1", "dape_v2_kerple_kernel5"],
)
def test_released_module_of_version_2(name):
    """The final scores that the authors' module computes from the same parameters and scores."""
    method, scores, final = load_release(name)
    length, radius = scores.shape[-1], method.lookahead
    position = torch.arange(length)
    mask = position > position[:, None]
    table = method.table(position.float())
    actual = method.modify_scores(Chunk(scores, None, position, position, mask, table))
    torch.testing.assert_close(actual.masked_fill(mask, 0.0), final, rtol=0, atol=1e-5)
    # As attention calls it, only the scores of the last k // 2 queries differ: the release has no hidden units after
    # the last key of the sequence.
    actual = method.final_scores(Chunk(scores, None, position, position, mask, table)).masked_fill(mask, 0.0)
    last = length - radius
    torch.testing.assert_close(actual[:, :, :last], final[:, :, :last], rtol=0, atol=1e-5)
    if radius:
        assert (actual - final)[:, :, last:].abs().max() > 0.1


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_scores_do_not_change_when_the_text_goes_on(kernel_size):
    torch.manual_seed(0)
    method = DapeV2Kerple(HEADS, kernel_size=kernel_size).double()
    scores = torch.randn(1, HEADS, 9, 9, dtype=torch.float64)
    position = torch.arange(9)
    mask = position > position[:, None]
    table = method.table(torch.arange(9.0))
    whole = method.final_scores(Chunk(scores, None, position, position, mask, table))
    for query in range(9):
        row, keys = slice(query, query + 1), slice(query + 1)
        chunk = Chunk(scores[:, :, row, keys], None, position[row], position[keys], mask[row, keys], table)
        decoded = method.final_scores(chunk)
        torch.testing.assert_close(decoded, whole[:, :, row, keys], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
def test_rotary_scores_of_version_2():
    """`dape_v2_rotary` is `dape_v2` on the scores of rotated queries and keys."""
    torch.manual_seed(0)
    method = DapeV2Rotary(HEADS, SIZE, fraction=0.5, base=100.0).double()
    rotary = Rotary(SIZE, fraction=0.5, base=100.0)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        return convolution_formula(method)(*rotary.rotate(query, key, position, position), visible)

    assert_is_formula(method, scores, HEADS, SIZE)


@pytest.mark.parametrize("kernel_size", [0, 2, -1])
def test_even_kernel_sizes_are_rejected(kernel_size):
    with pytest.raises(ValueError, match=f"kernel_size {kernel_size}: "):
        build("dape_v2", ModelShape(2, 4, 8, 1, 16), kernel_size=kernel_size)


def test_masked_scores_do_not_influence_others():
    torch.manual_seed(0)
    method = DapeV2Alibi(HEADS).double()
    position = torch.arange(9)
    mask = position > position[:, None]
    scores = torch.randn(1, HEADS, 9, 9, dtype=torch.float64)
    table = method.table(torch.arange(9.0))
    changed = torch.where(mask, torch.randn_like(scores) * 100, scores)
    before, after = (method.modify_scores(Chunk(s, None, position, position, mask, table)) for s in (scores, changed))
    assert torch.equal(before.masked_fill(mask, 0), after.masked_fill(mask, 0))
    # Two convolutions: a key's score depends on those of the two keys on either side.
    scores.requires_grad_()
    out = method.modify_scores(Chunk(scores, None, position, position, mask, table))
    (gradient,) = torch.autograd.grad(out[0, 0, 8, 4], scores)
    assert (gradient[0].abs().sum(0)[8] > 0).tolist() == [False, False, True, True, True, True, True, False, False]
