"""Inference modes: their names, and the keys that a query attends to."""

import pytest

from kerple.attention import (
    FULL,
    AttentionMode,
    DynamicNtk,
    LogLength,
    Mode,
    Span,
    YarnTemperature,
    grammar,
    parse_mode,
)
from kerple.positional.distance_maps import Clip, Group, Leaky, Linear, Log


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
    with pytest.raises(ValueError, match="full, window@W, blockwise, blockwise@L or sinks@S"):
        parse_mode(name)


def test_blocks_need_an_even_training_length():
    with pytest.raises(ValueError, match="training length, which is not known here"):
        parse_mode("blockwise")
    with pytest.raises(ValueError, match=r"blockwise@7.*7.*e\.g.*blockwise@6"):
        parse_mode("blockwise@7")
    with pytest.raises(ValueError, match=r"blockwise: .* 33 is odd"):
        parse_mode("blockwise", train_length=33)


@pytest.mark.parametrize("length", [1, 3, 9, 10, 23])
@pytest.mark.parametrize(
    "name",
    [
        "full",
        "window@3",
        "window@9",
        "window@20",
        "blockwise@2",
        "blockwise@6",
        "blockwise@40",
        "sinks@2+5",
        "sinks@9+3",
    ],
)
def test_mean_number_of_keys(name, length):
    mode = parse_mode(name)
    keys = [int((~mode.span.mask(range(i, i + 1), range(length), "cpu")).sum()) for i in range(length)]
    assert mode.mean_keys(length) == pytest.approx(sum(keys) / length)
    assert max(keys) <= mode.span.max_kv_len(length)


def test_modifiers():
    span = Span(window=508, sinks=4)
    assert parse_mode("sinks@4+508") == Mode("sinks@4+508", AttentionMode(span))
    assert parse_mode("sinks@4+508+reindexed+clip@256").attention == AttentionMode(span, True, Clip(256))
    assert parse_mode("full+group@8,512").attention.distance_map == Group(8, 512)
    assert parse_mode("window@9+leaky@4,2.5").attention == AttentionMode(Span(window=9), distance_map=Leaky(4, 2.5))
    assert parse_mode("blockwise@8+log@4").attention == AttentionMode(Span(block=4), distance_map=Log(4))
    assert parse_mode("full+linear@64", 32).attention.distance_map == Linear(64)
    assert parse_mode("full+linear", 32).attention.distance_map == Linear(32)
    assert parse_mode("full+logn", 32).attention.scaling == LogLength(32)
    assert parse_mode("full+yarn-temperature@4").attention.scaling == YarnTemperature(4.0)
    assert parse_mode("full+dynamic-ntk", 32).attention.dynamic_ntk == DynamicNtk(1.0, 32)
    assert parse_mode("full+dynamic-ntk@2", 32).attention.dynamic_ntk == DynamicNtk(2.0, 32)


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
    modes = [parse_mode(name, 128) for name in names]
    assert list(dict.fromkeys(mode.name for mode in modes)) == canonical.split()
    for mode in modes:
        assert parse_mode(mode.name, 128) == mode
    assert len({mode.attention for mode in modes}) == len(canonical.split())


def test_names_without_a_training_length_keep_their_lengths():
    assert [parse_mode(name).name for name in ("full+logn@9", "blockwise@8")] == ["full+logn@9", "blockwise@8"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sinks@4", "sinks@S"),
        ("sinks@0+4", "is unknown"),
        ("full+", "modifier '' is unknown"),
        ("full+rope", "'rope'"),
        ("full+clip", "'clip'"),
        ("full+clip@4,5", "'clip@4,5'"),
        ("full+clip@1.5", "must be clip@W"),
        ("full+group@4", "must be group@G,W"),
        ("full+logn@", r"must be logn\[@L\]"),
        ("full+logn", "logn.*logn@LENGTH"),
        ("full+dynamic-ntk@2", "dynamic-ntk.*train_length"),
        ("full+clip@4+clip@4", "clip"),
        ("full+clip@4+log@8", "clip.*log"),
        ("full+logn@8+yarn-temperature@2", "are both scalings of the scores"),
        ("window@8+reindexed", "use it with sinks@S"),
        ("full+leaky@4,0.5", "factor must be at least 1"),
        ("full+logn@1", "length must be at least 2"),
    ],
)
def test_invalid_modifiers(name, message):
    with pytest.raises(ValueError, match=message):
        parse_mode(name)


def test_the_grammar_lists_every_part():
    assert [syntax for syntax, _ in grammar()] == [
        *("full", "window@W", "blockwise[@L]", "sinks@S+W", "+reindexed", "+clip@W", "+group@G,W", "+linear[@L]"),
        *("+leaky@W,k", "+log@W", "+logn[@L]", "+yarn-temperature@F", "+dynamic-ntk[@F]"),
    ]
