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


def is_cpd_of_logarithms(points):
    return is_cpd(lambda distance: distance.log(), points)


@pytest.mark.parametrize(
    ("function", "argument", "message"),
    [
        (is_cpd_of_logarithms, [1], "at least two points"),
        (is_cpd_of_logarithms, [1, 2, 1], "all different"),
        (is_cpd_of_logarithms, [0, 1], "not finite"),
        (parse_sum, "log + pwoer", "'pwoer'"),
        (parse_sum, "cosine", "'cosine'.*log3.*gaussian3"),
        (parse_sum, "-1 gaussian", "-1 gaussian"),
        (parse_sum, "log + 0 power", "0 power"),
        (parse_sum, "log - power", "'log - power'"),
        (parse_sum, "log * power", "the option weight"),
        (parse_sum, "power^3", r"'power\^3'"),
        (parse_sum, "log + + power", "''"),
        (parse_sum, "log power", "'log power'"),
        (parse_sum, "", "''"),
        (parse_sum, 3, "3"),
    ],
)
def test_invalid_points_and_expressions(function, argument, message):
    with pytest.raises(ValueError, match=message):
        function(argument)


def test_expressions():
    assert parse_sum(" log+.5power + 2 * log3") == (("log", 1.0), ("power", 0.5), ("log3", 2.0))
