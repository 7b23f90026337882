"""DAPE V2 against convolutions written out key by key, in float64; no information from the future enters."""

import math

import pytest
import torch

from kerple.positional import DapeV2, DapeV2Alibi, DapeV2Fire, DapeV2Kerple
from tests.support.attention import assert_is_formula
from tests.unit.kerple.positional.test_dape import HEADS, SIZE, static_bias


def convolved(layer, inputs: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """`[b, i, t, t]`: the key at j gets the sum over its visible neighbours j - 1, j, j + 1, each by its own matrix."""
    inputs = torch.where(visible, inputs, 0.0)
    before = torch.cat((torch.zeros_like(inputs[..., :1]), inputs[..., :-1]), dim=-1)
    after = torch.cat((inputs[..., 1:], torch.zeros_like(inputs[..., :1])), dim=-1)
    parts = zip(layer.weight[:, :, 0].unbind(-1), (before, inputs, after), strict=True)
    return sum(torch.einsum("oi,bist->bost", matrix, part) for matrix, part in parts) + layer.bias[:, None, None]


def formula(method):
    def scores(query, key, visible):
        products = query @ key.transpose(-1, -2) / math.sqrt(SIZE)
        inputs, residual = products, products
        if method.static is not None:
            bias = BIASES[type(method)](method, key.shape[2]).expand_as(products)
            if method.variant == "Add_Residual":
                inputs, residual = products + bias, products + bias
            else:
                inputs = torch.cat((products, bias), dim=1)
                residual = products if method.variant == "Concat" else products + bias
        hidden = torch.nn.functional.leaky_relu(convolved(method.first, inputs, visible), 0.01)
        return residual + convolved(method.second, hidden, visible)

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
def test_values_and_gradients(cls, variant):
    torch.manual_seed(0)
    method = (cls(HEADS) if variant is None else cls(HEADS, variant=variant)).double()
    assert_is_formula(method, formula(method), HEADS, SIZE, atol=3e-6 if cls is DapeV2Kerple else 1e-10)


def test_masked_scores_do_not_influence_others():
    torch.manual_seed(0)
    method = DapeV2Alibi(HEADS).double()
    position = torch.arange(9)
    mask = position > position[:, None]
    scores = torch.randn(1, HEADS, 9, 9, dtype=torch.float64)
    table = method.table(torch.arange(9.0))
    changed = torch.where(mask, torch.randn_like(scores) * 100, scores)
    before, after = (method.modify_scores(s, None, position, position, mask, table) for s in (scores, changed))
    assert torch.equal(before.masked_fill(mask, 0), after.masked_fill(mask, 0))
    # Two convolutions: a key's score depends on those of the two keys on either side.
    scores.requires_grad_()
    out = method.modify_scores(scores, None, position, position, mask, table)
    (gradient,) = torch.autograd.grad(out[0, 0, 8, 4], scores)
    assert (gradient[0].abs().sum(0)[8] > 0).tolist() == [False, False, True, True, True, True, True, False, False]
