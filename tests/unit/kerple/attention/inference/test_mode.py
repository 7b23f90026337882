"""Inference modes: their names, which keys a query attends to, which methods support them, and
their scalings.
"""

import re
from dataclasses import replace

import pytest

from kerple.attention import (
    FULL,
    AttentionMode,
    DynamicNtk,
    LogLength,
    Mode,
    Span,
    YarnTemperature,
    parse_mode,
)
from kerple.attention.inference.mode import MODIFIERS
from kerple.positional import ModelShape, build, primary_names
from kerple.positional.distance_maps import Clip, Group, Leaky, Linear, Log

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=32)
MAP, LOG = AttentionMode(distance_map=Clip(4)), AttentionMode(distance_map=Log(4))
SINKS = AttentionMode(Span(window=4, sinks=2))
REINDEXED = AttentionMode(Span(window=4, sinks=2), reindexed=True)
NTK = AttentionMode(dynamic_ntk=DynamicNtk(1.0, 32))
SCALED = AttentionMode(scaling=LogLength(32))
WITHOUT_DISTANCE = {
    "none",
    "sinusoidal",
    "learned",
    "cope",
    "dape",
    "dape_v2",
    "forgetting",
    "cable",
    "stick_breaking",
}


@pytest.mark.parametrize("name", primary_names())
def test_supported_methods(name):
    method = build(name, SHAPE)
    rotates = method.turns
    assert SINKS.unsupported_reason(method) is None
    assert SCALED.unsupported_reason(method) is None
    assert (MAP.unsupported_reason(method) is None) == (name not in WITHOUT_DISTANCE)
    assert (LOG.unsupported_reason(method) is None) == (
        name not in WITHOUT_DISTANCE and not rotates
    )
    assert (NTK.unsupported_reason(method) is None) == rotates
    if "modify_scores" in method.hooks or name in WITHOUT_DISTANCE:
        assert "use sinks without reindexed" in str(REINDEXED.unsupported_reason(method))
    else:
        assert REINDEXED.unsupported_reason(method) is None


def test_reasons():
    assert "use leaky@W,k" in str(LOG.unsupported_reason(build("rotary", SHAPE)))
    assert "distance map clip has no meaning" in str(MAP.unsupported_reason(build("none", SHAPE)))
    dynamic = build("rotary", SHAPE, scaling="dynamic", factor=2.0, trained_length=32)
    assert "use full+dynamic-ntk" in str(SINKS.unsupported_reason(dynamic))
    assert "without a scaling" in str(NTK.unsupported_reason(dynamic))
    sampled = build("rotary", SHAPE, random_range=64)
    assert "sampled positions" in str(MAP.unsupported_reason(sampled))
    assert "or random positions" in str(NTK.unsupported_reason(sampled))
    assert "more than 2 dimensions" in str(
        NTK.unsupported_reason(build("xpos", replace(SHAPE, head_size=2)))
    )
    assert SINKS.unsupported_reason(sampled) is None
    with pytest.raises(ValueError, match="sinks need a window"):
        Span(sinks=4)
    with pytest.raises(ValueError, match="the mode has none"):
        AttentionMode(reindexed=True)
    with pytest.raises(ValueError, match="causal"):
        AttentionMode(Span(causal=False))


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"scaling": "linear", "factor": 3.0}, {"linear", "dynamic-ntk"}),
        ({"scaling": "ntk", "factor": 3.0}, {"linear", "dynamic-ntk"}),
        ({"scaling": "llama3", "factor": 3.0}, {"linear", "dynamic-ntk"}),
        ({"scaling": "yarn", "factor": 3.0}, {"linear", "dynamic-ntk", "yarn-temperature"}),
        (
            {"scaling": "yarn", "factor": 3.0, "attention_factor": 0.8},
            {"linear", "dynamic-ntk", "yarn-temperature"},
        ),
        ({"scaling": "yarn", "factor": 3.0, "attention_factor": 1.0}, {"linear", "dynamic-ntk"}),
        (
            {"scaling": "dynamic", "factor": 3.0},
            {"clip", "group", "leaky", "linear", "dynamic-ntk"},
        ),
        ({}, set()),
    ],
)
def test_modes_do_not_repeat_a_scaling(options, refused):
    """Also if only one layer has the scaling, or positions are sampled. `log` is not linear, so no
    rotation has it.
    """
    method = build("rotary", SHAPE, **options)
    layers = [
        build("per_layer", replace(SHAPE, layer=i), methods=["none", {"rotary": options}])
        for i in (0, 1)
    ]
    arguments = {
        "clip": "@9",
        "group": "@2,9",
        "leaky": "@9,2",
        "log": "@9",
        "yarn-temperature": "@3",
    }
    for name in MODIFIERS.keys() - {"reindexed"}:
        mode = parse_mode(f"full+{name}{arguments.get(name, '')}", 32).attention
        expected = name in refused | {"log"}
        assert (mode.unsupported_reason(method) is not None) == expected, name
        assert (mode.unsupported_by(layers, [None, None], "per_layer") is not None) == expected, (
            name
        )
    if options.get("scaling") == "yarn" and "yarn-temperature" in refused:
        mode = parse_mode("full+yarn-temperature@3").attention
        assert "yarn-temperature" in str(
            mode.unsupported_reason(build("rotary", SHAPE, random_range=64, **options))
        )


@pytest.mark.parametrize(
    ("name", "windows", "is_supported"),
    [
        ("window@4", [8, 8], True),
        ("window@9", [4, 8], False),
        ("window@9", [8, None], True),
        ("full", [8, 8], True),
        ("blockwise@8", [8, None], False),
        ("sinks@2+4", [8, None], False),
        ("sinks@2+4", [None, None], True),
    ],
)
def test_modes_of_models_with_windows(name, windows, is_supported):
    """A mode whose window is wider than that of all layers has no effect."""
    methods = [build("alibi", SHAPE)] * 2
    reason = parse_mode(name).attention.unsupported_by(methods, windows, "alibi")
    assert (reason is None) == is_supported


def test_parts_that_depend_on_the_length():
    mode = AttentionMode(distance_map=Linear(32), dynamic_ntk=DynamicNtk(2.0, 32)).at_length(128)
    assert mode.distance_map == Linear(32, divisor=4.0)
    assert mode.dynamic_ntk == DynamicNtk(2.0, 32, growth=7.0)
    assert mode.at_length(16) == AttentionMode(
        distance_map=Linear(32, 1.0), dynamic_ntk=DynamicNtk(2.0, 32, 1.0)
    )
    assert SINKS.at_length(128) is SINKS
    assert mode.length_dependent
    assert not SINKS.length_dependent


def test_names():
    assert parse_mode("full").span == FULL
    assert parse_mode("window@512").span == Span(window=512)
    assert parse_mode("blockwise@512").span == Span(block=256)
    assert parse_mode("blockwise", train_length=128).span == Span(block=64)
    assert parse_mode("blockwise@512", train_length=128).span == Span(block=256)


@pytest.mark.parametrize("length", [1, 3, 9, 10, 23])
@pytest.mark.parametrize(
    "name",
    ["full", "window@3", "window@20", "blockwise@6", "blockwise@40", "sinks@2+5", "sinks@9+3"],
)
def test_the_largest_number_of_keys(name, length):
    mode = parse_mode(name)
    keys = [
        int((~mode.span.mask(range(i, i + 1), range(length), "cpu")).sum()) for i in range(length)
    ]
    assert max(keys) == mode.span.max_kv_len(length)


def test_modifiers():
    span = Span(window=508, sinks=4)
    assert parse_mode("sinks@4+508") == Mode("sinks@4+508", AttentionMode(span))
    assert parse_mode("sinks@4+508+reindexed+clip@256").attention == AttentionMode(
        span, True, Clip(256)
    )
    assert parse_mode("full+group@8,512").attention.distance_map == Group(8, 512)
    assert parse_mode("window@9+leaky@4,2.5").attention == AttentionMode(
        Span(window=9), distance_map=Leaky(4, 2.5)
    )
    assert parse_mode("blockwise@8+log@4").attention == AttentionMode(
        Span(block=4), distance_map=Log(4)
    )
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
            [
                "sinks@4+124+clip@64+logn",
                "sinks@4+124+logn@128+clip@64+reindexed",
                "sinks@4+124+logn+clip@64",
            ],
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
    assert [parse_mode(name).name for name in ("full+logn@9", "blockwise@8")] == [
        "full+logn@9",
        "blockwise@8",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, f"'{re.escape(name)}' .*window@W")
            for name in ("window@0", "window@-3", "window@1.5", "Full", "blockwise@", "sinks@0+4")
        ),
        *(
            (name, rf"did you mean {re.escape(suggestion)}\?")
            for name, suggestion in (
                ("yarn", "full+yarn-temperature@F"),
                ("yarn@2", "full+yarn-temperature@2"),
                ("sinks@4", "sinks@4+W"),
                ("sinks@4,60", "sinks@4+60"),
                ("group@8,32", "full+group@8,32"),
                ("group@6", "full+group@6,W"),
                ("clip@3,9", "full+clip@3"),
                ("window@7,5", "window@7"),
                ("linear+logn", "full+linear+logn"),
                ("ntk", "full+dynamic-ntk"),
                ("window@8+clipp@4", "clip@4"),
                ("full+yarn", "yarn-temperature@F"),
                ("window", "window@W"),
                ("windw@4", "window@4"),
                ("fulll", "full"),
            )
        ),
        ("blockwise", "training length, which is not known here"),
        ("blockwise@7", r"blockwise@7.*7.*e\.g.*blockwise@6"),
        ("sinks@4", "sinks@S"),
        ("full+", "modifier ''"),
        (
            "full+rope",
            r"'rope' .*reindexed, clip@W, group@G,W, linear\[@L\], leaky@W,k, log@W, logn\[@L\], "
            r"yarn-temperature@F, dynamic-ntk\[@F\]",
        ),
        ("full+clip", "'clip'"),
        ("full+clip@4,5", "'clip@4,5'"),
        ("full+clip@1.5", "clip@W"),
        ("full+group@4", "group@G,W"),
        ("full+logn@", r"logn\[@L\]"),
        ("full+logn", "logn.*logn@LENGTH"),
        ("full+dynamic-ntk@2", "dynamic-ntk.*train_length"),
        ("full+clip@4+clip@4", "clip"),
        ("full+clip@4+log@8", "clip.*log"),
        ("full+logn@8+yarn-temperature@2", "logn and yarn-temperature"),
        ("window@8+reindexed", "use it with sinks@S"),
        ("full+leaky@4,0.5", "factor must be at least 1"),
        ("full+logn@1", "length must be at least 2"),
    ],
)
def test_invalid_names(name, message):
    with pytest.raises(ValueError, match=message):
        parse_mode(name)
