"""Inference modes: their names, and the keys that a query attends to."""

import pytest

from kerple.attention import FULL, Span
from megatron.evaluation.modes import parse_mode
from megatron.utils.errors import UserError


def test_names():
    assert parse_mode("full").span == FULL
    assert parse_mode("window@512").span == Span(window=512)
    assert parse_mode("blockwise@512").span == Span(block=256)
    assert parse_mode("blockwise", train_length=128).span == Span(block=64)
    assert parse_mode("blockwise@512", train_length=128).span == Span(block=256)


@pytest.mark.parametrize(
    "name",
    ["window", "window@", "window@0", "window@-3", "window@1.5", "Full", "sliding", "blockwise@", "blockwise@0"],
)
def test_unknown_names(name):
    with pytest.raises(UserError, match="choose full, window@W, blockwise or blockwise@L"):
        parse_mode(name)


def test_blocks_need_an_even_training_length():
    with pytest.raises(UserError, match="training length, which is not known here"):
        parse_mode("blockwise")
    with pytest.raises(UserError, match=r"blockwise@7: .* 7 is odd; choose an even length, e\.g\. blockwise@6"):
        parse_mode("blockwise@7")
    with pytest.raises(UserError, match=r"blockwise: .* 33 is odd"):
        parse_mode("blockwise", train_length=33)


@pytest.mark.parametrize("length", [1, 3, 9, 10, 23])
@pytest.mark.parametrize(
    "name", ["full", "window@3", "window@9", "window@20", "blockwise@2", "blockwise@6", "blockwise@40"]
)
def test_mean_number_of_keys(name, length):
    mode = parse_mode(name)
    keys = [position + 1 - mode.span.first_key(position) for position in range(length)]
    assert mode.mean_keys(length) == pytest.approx(sum(keys) / length)
    assert max(keys) <= mode.span.max_kv_len(length)
