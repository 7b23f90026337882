"""The kernels, expressions of them, and the numerical check that they are conditionally positive
definite.
"""

import pytest
import torch

from kerple.positional import is_cpd
from kerple.positional.kernels import KERNELS, parse_sum


def test_kernels_with_an_exponent_above_2_are_not_cpd():
    points = torch.linspace(0, 2, 9)
    for exponent in (2.1, 2.5, 4.0):
        for name, scalars in (("power", (1.0, exponent)), ("gaussian3", (1.0, 1.0, exponent))):
            kernel = KERNELS[name].value
            assert not is_cpd(lambda distance: kernel(distance, *scalars), points)  # noqa: B023
        assert is_cpd(lambda distance: KERNELS["power"].value(distance, 1.0, 2.0), points)
    assert not is_cpd(lambda distance: -KERNELS["gaussian"].value(distance, 1.0, 1.0), points)
    assert not is_cpd(lambda distance: distance, points)


@pytest.mark.parametrize(
    ("points", "message"),
    [([1], "at least two points"), ([1, 2, 1], "all different"), ([0, 1], "not finite")],
)
def test_invalid_points_are_rejected(points, message):
    with pytest.raises(ValueError, match=message):
        is_cpd(lambda distance: distance.log(), points)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("log + pwoer", "'pwoer'"),
        ("cosine", "'cosine'.*log3.*gaussian3"),
        ("-1 gaussian", "-1 gaussian"),
        ("log + 0 power", "0 power"),
        ("log - power", "'log - power'"),
        ("log * power", "the option weight"),
        ("power^3", r"'power\^3'"),
        ("log + + power", "''"),
        ("log power", "'log power'"),
        ("", "''"),
        (3, "3"),
    ],
)
def test_invalid_expressions_are_rejected(expression, message):
    with pytest.raises(ValueError, match=message):
        parse_sum(expression)


def test_expressions():
    assert parse_sum(" log+.5power + 2 * log3") == (("log", 1.0), ("power", 0.5), ("log3", 2.0))
