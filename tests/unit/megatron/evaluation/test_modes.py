"""Inference modes as users give them."""

import pytest

from megatron.evaluation.modes import parse_mode, parse_modes
from megatron.utils.errors import UserError


def test_each_mode_is_listed_once():
    modes = parse_modes(["full+logn@128", "window@9", "full+logn", "blockwise@128"], train_length=128)
    assert [mode.name for mode in modes] == ["full+logn", "window@9", "blockwise"]


def test_invalid_names():
    with pytest.raises(UserError, match="choose full, window@W"):
        parse_mode("sliding")
