"""Transformer-XL's scores against the four terms of the paper (section 3.3), in float64."""

import math

import pytest
import torch

from kerple.positional import TransformerXL
from tests.support.attention import assert_is_formula

HEADS, SIZE, HIDDEN = 3, 4, 10


@pytest.mark.usefixtures("small_chunks")
def test_values_and_gradients():
    torch.manual_seed(0)
    method = TransformerXL(HEADS, SIZE, HIDDEN).double()
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter)

    def scores(query, key, visible):
        length = key.shape[2]
        projection = method.relative.weight.view(HEADS, SIZE, HIDDEN)
        u, v = method.content_bias[:, 0], method.position_bias[:, 0]
        rows = []
        for i in range(length):
            row = []
            for j in range(length):
                angles = [max(i - j, 0) / 10_000 ** (2 * k / HIDDEN) for k in range(HIDDEN // 2)]
                vector = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
                relative = projection @ vector
                q, k = query[:, :, i], key[:, :, j]
                row.append((q * k).sum(-1) + (q * relative).sum(-1) + (k * u).sum(-1) + (relative * v).sum(-1))
            rows.append(torch.stack(row, dim=-1))
        return torch.stack(rows, dim=-2) / math.sqrt(SIZE)

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
