"""DAPE V2 against the authors' modules, and against convolutions written out key by key, in float64."""

import math

import pytest
import torch

from kerple.positional import (
    Chunk,
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
from tests.unit.kerple.positional.test_dape import HEADS, SIZE, static_bias


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


def formula(method):
    def scores(query, key, visible):
        length = key.shape[2]
        # Later keys, which are masked, so that the hidden units after the last query exist for all queries.
        later = method.lookahead
        visible = torch.nn.functional.pad(visible, (0, later))
        earlier = ~visible & (torch.arange(length + later) < torch.arange(length)[:, None])
        products = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
        inputs, residual = products, products
        if method.static is not None:
            bias = BIASES[type(method)](method, key.shape[2]).expand_as(products)
            if method.variant == "Add_Residual":
                inputs, residual = products + bias, products + bias
            else:
                inputs = torch.cat((products, bias), dim=1)
                residual = products if method.variant == "Concat" else products + bias
        inputs = torch.nn.functional.pad(inputs, (0, later))
        hidden = torch.nn.functional.leaky_relu(convolved(method.first, inputs, visible), 0.01)
        return residual + convolved(method.second, hidden, ~earlier)[..., :length]

    return scores


def alibi_bias(method, length):
    position = torch.arange(length, dtype=torch.float64)
    return -torch.tensor([2**-4, 2**-8, 2**-2])[:, None, None] * (position[:, None] - position).clamp(min=0)


def kerple_bias(method, length):
    position = torch.arange(length, dtype=torch.float64)
    distance = (position[:, None] - position).clamp(min=0)
    return -method.static.bias_p * torch.log1p(method.static.bias_a * distance)


BIASES = {DapeV2Alibi: alibi_bias, DapeV2Kerple: kerple_bias, DapeV2Fire: static_bias}


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
def test_values_and_gradients(cls, variant, kernel_size):
    torch.manual_seed(0)
    options = {"kernel_size": kernel_size} if variant is None else {"kernel_size": kernel_size, "variant": variant}
    method = cls(HEADS, **options).double()
    assert_is_formula(method, formula(method), HEADS, SIZE, atol=3e-6 if cls is DapeV2Kerple else 1e-10)


@pytest.mark.parametrize(
    "name",
    ["dape_v2_kerple", "dape_v2_alibi", "dape_v2_fire", "dape_v2_kerple_kernel1", "dape_v2_kerple_kernel5"],
)
def test_released_module(name):
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
def test_rotary_scores():
    """`dape_v2_rotary` is `dape_v2` on the scores of rotated queries and keys."""
    torch.manual_seed(0)
    method = DapeV2Rotary(HEADS, SIZE, fraction=0.5, base=100.0).double()
    rotary = Rotary(SIZE, fraction=0.5, base=100.0)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        return formula(method)(*rotary.rotate(query, key, position, position), visible)

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
