"""Gradients of decays, and the order of sums, on a GPU or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from tests.support.attention import float64_arguments, random_attend_arguments, run_attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_decay_of_strong_gates():
    """The difference of neighbors is 40, so that rounding each tile's sums to float32 is the
    largest error.
    """
    arguments = random_attend_arguments(
        1, 1, 130, 130, 16, bias=False, weight=False, decay=True, device=DEVICE
    )
    arguments["decay_sums"] = (
        (-40.0 * torch.arange(130, device=DEVICE).double()).expand(1, 1, -1).requires_grad_()
    )
    expected = run_attend("reference", float64_arguments(arguments))
    for actual, expected_tensor in zip(run_attend("fused", arguments), expected, strict=True):
        assert (actual.double() - expected_tensor).norm() <= 1e-4 * expected_tensor.norm() + 1e-5


def test_repeated_runs_are_bitwise_identical():
    arguments = random_attend_arguments(
        1, 2, 20, 50, 16, weight=False, decay=True, kv_heads=1, device=DEVICE
    )
    for first, second in zip(
        run_attend("fused", arguments), run_attend("fused", arguments), strict=True
    ):
        assert torch.equal(first, second)
