"""Both versions of DAPE against the formulas of the papers in float64: values and gradients."""

import math

import pytest
import torch

from kerple.attention import Attention
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
    Rotary,
)
from kerple.positional.dape import VARIANTS
from tests.support.attention import assert_is_formula, modified_scores
from tests.support.dape_release import load_release

HEADS, SIZE = 3, 4


def formula(method):
    def scores(query, key, visible):
        position, products = (
            torch.arange(key.shape[2]),
            query @ key.transpose(-1, -2) / math.sqrt(SIZE),
        )
        return modified_scores(method, products, query, position[:, None] - position, ~visible)

    return scores


@pytest.mark.parametrize(
    "name",
    [
        *("dape", "dape_kerple", "dape_alibi", "dape_fire", "fire"),
        *(
            "dape_v2_kerple",
            "dape_v2_alibi",
            "dape_v2_fire",
            "dape_v2_kerple_kernel1",
            "dape_v2_kerple_kernel5",
        ),
    ],
)
def test_released_module(name):
    """The final scores that the authors' module computes from the same parameters and scores."""
    method, scores, final = load_release(name)
    length, radius = scores.shape[-1], method.lookahead
    position = torch.arange(length)
    mask = position > position[:, None]
    chunk = Chunk(scores, None, position, position, mask, method.table(position.float()))
    actual = method.modify_scores(chunk).masked_fill(mask, 0.0)
    torch.testing.assert_close(actual, final, rtol=0, atol=1e-5)
    # As attention calls it, only the scores of the last k // 2 queries differ: the release has no
    # hidden units after the last key of the sequence.
    actual, last = method.final_scores(chunk).masked_fill(mask, 0.0), length - radius
    torch.testing.assert_close(actual[:, :, :last], final[:, :, :last], rtol=0, atol=1e-5)
    if radius:
        assert (actual - final)[:, :, last:].abs().max() > 0.1


@pytest.mark.parametrize(
    ("cls", "heads", "width", "kernel"), [(DapeAlibi, 500, 400, 1), (DapeV2Alibi, 40, 400, 9)]
)
def test_initial_weights_are_those_of_nn_linear_and_of_convolutions(cls, heads, width, kernel):
    options = {"kernel_size": kernel} if cls is DapeV2Alibi else {}
    method = cls(heads, mlp_width=width, **options)
    method.reset_parameters(torch.Generator().manual_seed(1))
    cast = cls(heads, mlp_width=width, **options).bfloat16()
    cast.reset_parameters(torch.Generator().manual_seed(1))
    for layer, inputs in ((method.first, 2 * heads * kernel), (method.second, width * kernel)):
        for parameter in (layer.weight, layer.bias):
            assert parameter.abs().max() <= inputs**-0.5
            assert parameter.std().item() == pytest.approx((3 * inputs) ** -0.5, rel=0.1)
    for parameter, cast_parameter in zip(method.parameters(), cast.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), cast_parameter)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Dape, {}),
        *((DapeAlibi, {"variant": variant}) for variant in VARIANTS),
        *((DapeKerple, {}), (DapeFire, {})),
        *((DapeV2, {}), (DapeV2, {"kernel_size": 5})),
        *((DapeV2Alibi, {"variant": variant}) for variant in VARIANTS),
        *((DapeV2Kerple, {}), (DapeV2Kerple, {"kernel_size": 5}), (DapeV2Fire, {})),
    ],
)
def test_values_and_gradients(cls, options):
    torch.manual_seed(0)
    method = cls(HEADS, **options).double()
    assert_is_formula(
        method,
        formula(method),
        HEADS,
        SIZE,
        atol=3e-6 if cls in (DapeKerple, DapeV2Kerple) else 1e-10,
    )


@pytest.mark.parametrize(
    "cls", [DapeKerple, DapeAlibi, DapeFire, DapeV2Kerple, DapeV2Alibi, DapeV2Fire]
)
def test_options_are_those_of_the_parts(cls):
    method = cls(HEADS, mlp_width=7, variant="Concat")
    assert method.variant == "Concat"
    assert method.first.weight.shape[0] == 7
    assert method.counts_from_start == (cls in (DapeFire, DapeV2Fire))
    if method.counts_from_start:
        method = cls(HEADS, mlp_width=7, threshold=8.0)
        assert method.static.threshold == 8.0
        assert method.static.first.weight.shape[0] == 7
    assert method.statistics().keys() == method.static.statistics().keys()


def test_options_of_methods_without_a_static_bias():
    for method in (Dape(HEADS, 7), DapeRotary(HEADS, SIZE, 7), DapeV2(HEADS, 7, 5)):
        assert method.first.weight.shape[:2] == (7, HEADS)
        assert method.statistics() == {}
    method = DapeV2Rotary(HEADS, SIZE, 7, 5)
    assert method.first.weight.shape == (7, HEADS, 1, 5)


def test_scores_of_other_heads_are_rejected():
    with pytest.raises(ValueError, match=r"3 heads.*\[1, 2, "):
        Attention(Dape(3))(*torch.randn(3, 1, 2, 5, SIZE))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("cls", [DapeRotary, DapeV2Rotary])
def test_rotary_scores(cls):
    """They are `dape` and `dape_v2` on the scores of rotated queries and keys."""
    torch.manual_seed(0)
    method = cls(HEADS, SIZE, fraction=0.5, base=100.0).double()
    rotary = Rotary(SIZE, fraction=0.5, base=100.0)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        return formula(method)(*rotary.rotate(query, key, position, position), visible)

    assert_is_formula(method, scores, HEADS, SIZE)


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
        chunk = Chunk(
            scores[:, :, row, keys], None, position[row], position[keys], mask[row, keys], table
        )
        decoded = method.final_scores(chunk)
        torch.testing.assert_close(decoded, whole[:, :, row, keys], rtol=0, atol=1e-12)


def test_only_masked_keys_before_the_query_have_no_hidden_units():
    """Also if keys after attention sinks are missing, and if the query's own key is masked."""
    torch.manual_seed(0)
    position = torch.arange(9)
    mask = (position > position[:, None]) | (torch.rand(9, 9) < 0.5)
    mask[3, 3] = True
    expected = mask & (position < position[:, None])
    for keys in (position, position[2:], torch.tensor([0, 1, 4, 5, 6, 7, 8])):
        hidden = DapeV2(HEADS).hidden_mask(mask[3:, keys], position[3:], keys)
        assert torch.equal(hidden, expected[3:, keys])


def test_masked_scores_do_not_influence_others():
    torch.manual_seed(0)
    method = DapeV2Alibi(HEADS).double()
    position = torch.arange(9)
    mask = position > position[:, None]
    scores = torch.randn(1, HEADS, 9, 9, dtype=torch.float64)
    table = method.table(torch.arange(9.0))
    changed = torch.where(mask, torch.randn_like(scores) * 100, scores)
    before, after = (
        method.modify_scores(Chunk(s, None, position, position, mask, table))
        for s in (scores, changed)
    )
    assert torch.equal(before.masked_fill(mask, 0), after.masked_fill(mask, 0))
    # Two convolutions: a key's score depends on those of the two keys on either side.
    scores.requires_grad_()
    out = method.modify_scores(Chunk(scores, None, position, position, mask, table))
    (gradient,) = torch.autograd.grad(out[0, 0, 8, 4], scores)
    assert (gradient[0].abs().sum(0)[8] > 0).tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
