"""Scalings of the scores and of rotations in inference modes."""

import math

import pytest
import torch

from kerple.attention import AttentionMode, DynamicNtk, LogLength, YarnTemperature


def test_scalings_of_queries():
    query = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    scaled = AttentionMode(scaling=LogLength(10)).scale_query(query, torch.arange(8, 13))
    for row, n in enumerate((9, 10, 11, 12, 13)):
        factor = 1.0 if n <= 10 else math.log(n) / math.log(10)
        torch.testing.assert_close(scaled[:, :, row], query[:, :, row] * factor, rtol=1e-14, atol=0)
    warm = AttentionMode(scaling=YarnTemperature(8.0)).scale_query(query, torch.arange(5))
    torch.testing.assert_close(warm, query * (0.1 * math.log(8) + 1) ** 2, rtol=1e-14, atol=0)
    for build_scaling in (
        lambda: LogLength(1),
        lambda: YarnTemperature(0.5),
        lambda: DynamicNtk(0.5, 8),
    ):
        with pytest.raises(ValueError, match="must be at least"):
            build_scaling()
