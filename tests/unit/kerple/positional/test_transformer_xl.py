"""Transformer-XL's scores against the four terms of the paper (section 3.3), in float64."""

import pytest
import torch

from kerple.positional import TransformerXL
from tests.support.attention import assert_is_formula, modified_scores

HEADS, SIZE, HIDDEN = 3, 4, 10


@pytest.mark.usefixtures("small_chunks")
def test_values_and_gradients():
    torch.manual_seed(0)
    method = TransformerXL(HEADS, SIZE, HIDDEN).double()
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter)

    def scores(query, key, visible):
        """(q + u).k + (q + v).W r, over sqrt(d)."""
        position, query = torch.arange(key.shape[2]), query + method.content_bias
        products = query @ key.transpose(-1, -2) / SIZE**0.5
        return modified_scores(method, products, query, position[:, None] - position, ~visible)

    # The sines are rounded to float32.
    assert_is_formula(method, scores, HEADS, SIZE, atol=2e-6)


def test_parameters():
    method = TransformerXL(12, 64, 768)
    assert {name: tuple(parameter.shape) for name, parameter in method.named_parameters()} == {
        "content_bias": (12, 1, 64),
        "position_bias": (12, 1, 64),
        "relative.weight": (768, 768),
    }
    assert method.relative.weight.std().item() == pytest.approx(0.02, rel=0.02)
    with pytest.raises(ValueError, match="an even hidden size; got 9"):
        TransformerXL(3, 3, 9)
