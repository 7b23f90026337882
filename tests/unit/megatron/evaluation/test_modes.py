"""Inference modes as users give them."""

import pytest

from megatron.evaluation.modes import parse_mode, parse_modes
from megatron.utils.errors import UserError


@pytest.mark.parametrize(
    ("names", "canonical"),
    [
        (["full+logn@9+clip@4", "full+clip@4+logn@9"], "full+clip@4+logn@9"),
        (["full+logn", "full+logn@128"], "full+logn"),
        (["full+linear@128", "full+linear"], "full+linear"),
        (["full+dynamic-ntk@1", "full+dynamic-ntk@1.00", "full+dynamic-ntk"], "full+dynamic-ntk"),
        (["full+dynamic-ntk@2.50", "full+dynamic-ntk@2.5"], "full+dynamic-ntk@2.5"),
        (["blockwise@128", "blockwise"], "blockwise"),
        (["window@9+leaky@4,8.0", "window@9+leaky@4,8"], "window@9+leaky@4,8"),
        (
            ["sinks@4+124+clip@64+logn", "sinks@4+124+logn@128+clip@64+reindexed", "sinks@4+124+logn+clip@64"],
            "sinks@4+124+clip@64+logn sinks@4+124+reindexed+clip@64+logn",
        ),
        (["full+logn@64", "blockwise@64"], "full+logn@64 blockwise@64"),
    ],
)
def test_the_same_mode_has_one_name(names, canonical):
    modes = parse_modes(names, train_length=128)
    assert [mode.name for mode in modes] == canonical.split()
    for mode in modes:
        assert parse_mode(mode.name, 128) == mode
    assert {parse_mode(name, 128).attention for name in names} == {mode.attention for mode in modes}


def test_names_without_a_training_length_keep_their_lengths():
    assert [mode.name for mode in parse_modes(["full+logn@9", "blockwise@8"])] == ["full+logn@9", "blockwise@8"]


def test_invalid_names():
    with pytest.raises(UserError, match="choose full, window@W"):
        parse_mode("sliding")
