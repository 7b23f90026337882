"""ALiBi's slopes and bias, from the paper's description."""

import pytest
import torch

from kerple.positional import Alibi, KerplePowerOriginal


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        # The slopes of 8 heads, then the first, third, ... of 16.
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (3, [4, 8, 2]),
    ],
)
def test_slopes(heads, exponents):
    expected = torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float64)
    # Casting the model must not round the slopes.
    method = Alibi(num_heads=heads).bfloat16()
    distance = torch.tensor([0.0, 1.0, 2.0, 513.0, 65_536.0])
    bias = method.bias(distance)
    assert bias.dtype == torch.float32
    torch.testing.assert_close(
        bias.double(), -expected[:, None] * distance.double(), rtol=1e-7, atol=0
    )
    assert method.bias(distance.reshape(5, 1)).shape == (heads, 5, 1)
    assert not method.state_dict()


def test_kerple_power_original_has_slopes_of_at_least_0_01():
    distance = torch.tensor([0.0, 10.0])
    bias = KerplePowerOriginal(num_heads=8).bias(distance)
    assert torch.equal(bias[:6], Alibi(num_heads=8).bias(distance)[:6])
    torch.testing.assert_close(bias[6:, 1], torch.tensor([-0.1, -0.1]))
