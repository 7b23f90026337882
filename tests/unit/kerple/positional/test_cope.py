"""CoPE against the paper's equations 2 to 5, in float64."""

import math

import pytest
import torch

from kerple.positional import Chunk, Cope
from tests.support.attention import assert_is_formula


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("npos_max", [4, 64])  # with and without reaching the maximum
def test_values_and_gradients(npos_max):
    torch.manual_seed(0)
    method = Cope(4, npos_max).double()
    torch.nn.init.normal_(method.pos_emb)

    def scores(query, key, visible):
        products = query @ key.transpose(-1, -2) / math.sqrt(4)
        gates = torch.where(visible, 1 / (1 + torch.exp(-products)), 0.0)
        later = torch.arange(key.shape[2])[:, None] >= torch.arange(key.shape[2])
        counts = (gates @ later.double()).clamp(max=npos_max - 1)
        # Linear interpolation as a sum of hat functions, one around each integer position.
        hats = (1 - (counts[..., None] - torch.arange(npos_max)).abs()).clamp(min=0)
        return products + torch.einsum("bhijp,dp,bhid->bhij", hats, method.pos_emb, query)

    assert_is_formula(method, scores, 3, 4)


def test_initially_the_scores_do_not_change():
    method = Cope(8)
    assert method.pos_emb.shape == (8, 64)
    scores = torch.randn(1, 2, 3, 3)
    position = torch.arange(3)
    chunk = Chunk(scores, torch.randn(1, 2, 3, 8), position, position, position > position[:, None])
    adapted = method.modify_scores(chunk)
    assert torch.equal(adapted, scores)
