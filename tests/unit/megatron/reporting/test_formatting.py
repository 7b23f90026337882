"""Numbers with errors and names for files."""

import math

import pytest

from megatron.reporting.formatting import (
    best_texts,
    format_difference,
    format_mean,
    format_number,
    slug,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.7099, "2.710"),
        (21.44, "21.44"),
        (101.3, "101.3"),
        (22621.4, "22,621"),
        (9.99996, "10.00"),
        (0.0123, "0.01230"),
        (0.0, "0"),
        (3.2e9, "3.200e+09"),
    ],
)
def test_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3.4121, 3.4125], "3.412 ± 0.000"),
        ([3.4121, 3.4125, 3.4123], "3.41230 ± 0.00020"),
        ([197.74, 197.763], "197.8 ± 0.0"),
        ([31.2, 35.9, 29.4], "32.2 ± 3.4"),
        ([23.1, 24.2, 23.9, 24.0, 23.3], "23.70 ± 0.47"),
        ([23.9], "23.90"),
        ([23.9, math.nan], "23.90"),
        ([23.0, 24.0], "23.50 ± 0.71"),
        ([5507.0, 2507.0], "4,007 ± 2,121"),
        ([1.0, 1.1409], "1.070 ± 0.100"),
        ([2.7501, 2.7499], "2.750 ± 0.000"),
        ([2.75, 2.75], "2.750"),
        ([0.3, 0.1 + 0.2], "0.3000"),
        ([3.2e9, 3.4e9], "3.300e+09 ± 1.4e+08"),
        ([math.inf, 1.0], "inf"),
        ([math.nan], "n/a"),
    ],
)
def test_mean(values, text):
    assert format_mean(values) == text


def test_standard_errors_have_two_digits():
    assert format_mean([30.0, 34.0], standard_error=True) == "32.0 ± 2.0"


@pytest.mark.parametrize(
    ("difference", "error", "text"),
    [
        (0.01234, 0.0041, "+0.0123 ± 0.0041"),
        (-0.5, None, "-0.5000"),
        (-0.00004, None, "0.0000"),
        (0.00006, None, "+0.0001"),
        (1234.5, 1.0, "+1,234.5000 ± 1.0000"),
    ],
)
def test_difference(difference, error, text):
    assert format_difference(difference, error) == text


def test_slug():
    assert slug("GitHub", None, 512, "last-k@256") == "GitHub-512-last-k-256"
    assert slug("kernels", '"><script>alert(1)</script>') == "kernels-script-alert-1-script"
    assert slug("../..", ".", "a") == "a"
    long = [slug("漢" * 4000 + end) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name.encode()) <= 120 for name in long)


@pytest.mark.parametrize(
    ("best", "values", "expected"),
    [
        ("lowest", [[3.40012], [3.40041], [3.401]], [True, True, False]),
        ("highest", [[3.40012], [3.40041], [3.401]], [False, False, True]),
        ("lowest", [[3.4121, 3.4125], [3.2, 3.63], [3.5]], [True, False, False]),
        (
            "lowest",
            [[3.4121, 3.4125, 3.4123], [3.1, 3.414, 3.728], [3.5]],
            [True, True, False],
        ),  # 3.41 ± 0.31
        ("lowest", [[12_345.1], [12_345.4], []], [True, True, False]),
        ("lowest", [[3.4], []], [False, False]),
    ],
)
def test_best_values_as_printed(best, values, expected):
    means = [sum(cell) / len(cell) if cell else math.nan for cell in values]
    assert best_texts(means, list(map(format_mean, values)), best) == expected
