"""The kernels for the gradients of tables, in Triton's interpreter; `test_kernels.py` covers more
sizes and windows.
"""

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention.backends.triton import table_kernels
from tests.support.attention import float64_arguments, random_attend_arguments, run_attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_sums_along_diagonals():
    """Row i and column j of a tile at block distance k have the distance k * 16 + i - j."""
    heads, parts, count, side, length = 2, 2, 3, 16, 40
    tiles = torch.randn(heads, parts, count, side, side, device=DEVICE)
    result = torch.zeros(heads, length, device=DEVICE)
    table_kernels.sum_diagonals_kernel[(count, 2, heads)](
        tiles, result, result.stride(0), parts, length, BLOCK=side, COLUMNS=side // 2
    )
    expected = torch.zeros(heads, length, dtype=torch.float64, device=DEVICE)
    for k in range(count):
        for i in range(side):
            for j in range(side):
                if 0 <= k * side + i - j < length:
                    expected[:, k * side + i - j] += tiles[:, :, k, i, j].double().sum(1)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)


def test_a_bias_and_a_decay():
    """The keys of a tile are in two blocks of prefix sums, because there are 53 keys before the
    first query.
    """
    arguments = random_attend_arguments(1, 1, 97, 150, 16, weight=False, decay=True, device=DEVICE)
    expected = run_attend("reference", float64_arguments(arguments))
    for actual, expected_tensor in zip(run_attend("fused", arguments), expected, strict=True):
        assert (actual.double() - expected_tensor).norm() <= 2e-6 * expected_tensor.norm() + 1e-5
