"""Attention modes: which methods support them, and their scalings of the scores."""

import math
from dataclasses import replace

import pytest
import torch

from kerple.attention import AttentionMode, DynamicNtk, LogLength, Span, YarnTemperature
from kerple.positional import ModelShape, build, primary_names
from kerple.positional.distance_maps import Clip, Linear, Log

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=32)
MAP, LOG = AttentionMode(distance_map=Clip(4)), AttentionMode(distance_map=Log(4))
SINKS = AttentionMode(Span(window=4, sinks=2))
REINDEXED = AttentionMode(Span(window=4, sinks=2), reindexed=True)
NTK = AttentionMode(dynamic_ntk=DynamicNtk(1.0, 32))
SCALED = AttentionMode(scaling=LogLength(32))
WITHOUT_DISTANCE = {"none", "sinusoidal", "learned", "cope", "dape", "dape_v2", "forgetting", "cable", "stick_breaking"}


@pytest.mark.parametrize("name", primary_names())
def test_supported_methods(name):
    method = build(name, SHAPE)
    rotates = method.turns
    assert SINKS.unsupported_reason(method) is None
    assert SCALED.unsupported_reason(method) is None
    assert (MAP.unsupported_reason(method) is None) == (name not in WITHOUT_DISTANCE)
    assert (LOG.unsupported_reason(method) is None) == (name not in WITHOUT_DISTANCE and not rotates)
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
    assert "more than 2 dimensions" in str(NTK.unsupported_reason(build("xpos", replace(SHAPE, head_size=2))))
    assert SINKS.unsupported_reason(sampled) is None
    with pytest.raises(ValueError, match="sinks need a window"):
        Span(sinks=4)
    with pytest.raises(ValueError, match="the mode has none"):
        AttentionMode(reindexed=True)


def test_scalings_of_queries():
    query = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    scaled = AttentionMode(scaling=LogLength(10)).scale_query(query, torch.arange(8, 13))
    for row, n in enumerate((9, 10, 11, 12, 13)):
        factor = 1.0 if n <= 10 else math.log(n) / math.log(10)
        torch.testing.assert_close(scaled[:, :, row], query[:, :, row] * factor, rtol=1e-14, atol=0)
    warm = AttentionMode(scaling=YarnTemperature(8.0)).scale_query(query, torch.arange(5))
    torch.testing.assert_close(warm, query * (0.1 * math.log(8) + 1) ** 2, rtol=1e-14, atol=0)
    for build_scaling in (lambda: LogLength(1), lambda: YarnTemperature(0.5), lambda: DynamicNtk(0.5, 8)):
        with pytest.raises(ValueError, match="must be at least"):
            build_scaling()


def test_parts_that_depend_on_the_length():
    mode = AttentionMode(distance_map=Linear(32), dynamic_ntk=DynamicNtk(2.0, 32)).at_length(128)
    assert mode.distance_map == Linear(32, divisor=4.0)
    assert mode.dynamic_ntk == DynamicNtk(2.0, 32, growth=7.0)
    assert mode.at_length(16) == AttentionMode(distance_map=Linear(32, 1.0), dynamic_ntk=DynamicNtk(2.0, 32, 1.0))
    assert SINKS.at_length(128) is SINKS
    assert mode.length_dependent
    assert not SINKS.length_dependent
