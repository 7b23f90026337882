"""Inference modes by name."""

import pytest

from megatron.config.errors import UserError
from megatron.evaluation.modes import parse_mode


def test_names():
    assert parse_mode("full").window is None
    assert parse_mode("window@512").window == 512


@pytest.mark.parametrize("name", ["window", "window@", "window@0", "window@-3", "window@1.5", "Full", "sliding"])
def test_other_names_are_refused(name):
    with pytest.raises(UserError, match="choose full or window@W"):
        parse_mode(name)


@pytest.mark.parametrize(("name", "length"), [("full", 9), ("window@3", 9), ("window@9", 9), ("window@20", 9)])
def test_mean_number_of_keys(name, length):
    mode = parse_mode(name)
    seen = [min(position + 1, mode.window or length) for position in range(length)]
    assert mode.keys(length) == pytest.approx(sum(seen) / length)
