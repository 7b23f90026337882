"""Modes of attention against explicit masks and distance matrices in float64: one method of each
kind, with a KV cache and without, across the boundaries of chunks and of the cache.
"""

import math

import pytest
import torch
from torch import Tensor

from kerple.attention import (
    AttentionMode,
    DynamicNtk,
    LogLength,
    Span,
    YarnTemperature,
    attend_in_mode,
)
from kerple.attention.inference import attend as mode_attention
from kerple.positional import ModelShape, build
from kerple.positional.distance_maps import Clip, Group, Leaky, Linear, Log
from megatron.model.attention import SelfAttention
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from tests.support.attention import modified_scores, peak_memory, xpos_products
from tests.support.language_models import model_settings
from tests.support.methods import methods_and_variants

LENGTH, HEADS, HEAD_SIZE = 150, 2, 8


def mapped_distances(mode: AttentionMode) -> Tensor:
    """The distance of each pair in a mode, float64 `[s, s]`, written pair by pair."""
    distances = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(i + 1):
            query = i
            if mode.reindexed and j < mode.span.sinks:
                query = min(i, mode.span.sinks + (mode.span.window or 0) - 1)
            distance: float = query - j
            match mode.distance_map:
                case Clip(window):
                    distance = min(distance, window)
                case Leaky(window, factor) if distance >= window:
                    distance = window + (distance - window) / factor
                case Group(size, window) if distance >= window:
                    distance = query // size - j // size + window - window // size
                case Linear(length):
                    distance = distance * min(1, length / LENGTH)
                case Log(window) if distance > window:
                    distance = window + window * math.log(distance / window)
            distances[i, j] = distance
    return distances


def visible(span: Span) -> Tensor:
    """Bool `[s, s]`: whether the query attends to the key."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    window = LENGTH if span.window is None else span.window
    return (j <= i) & ((i - j < window) | (j < span.sinks))


def rotated_products(
    query: Tensor, key: Tensor, distances: Tensor, base: float, kept: int
) -> Tensor:
    """q.k after rotations by angles in proportion to the distances, for the first `kept`
    frequencies: real parts of complex products.
    """
    half = HEAD_SIZE // 2
    frequencies = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = distances[..., None] * frequencies.masked_fill(torch.arange(half) >= kept, 0.0)
    query, key = (torch.complex(states[..., :half], states[..., half:]) for states in (query, key))
    products = query[:, :, :, None] * key[:, :, None].conj()
    return (products * torch.polar(torch.ones_like(angles), angles)).real.sum(-1)


def cope_scores(method, scores: Tensor, query: Tensor, seen: Tensor) -> Tensor:
    positions = (
        (scores.sigmoid() * seen)
        .flip(-1)
        .cumsum(-1)
        .flip(-1)
        .clamp(max=method.pos_emb.shape[1] - 1)
    )
    products = query @ method.pos_emb
    low, high = (products.gather(-1, part.long()) for part in (positions.floor(), positions.ceil()))
    return scores + low + (high - low) * (positions - positions.floor())


def expected_context(
    layer: SelfAttention, hidden: Tensor, mode: AttentionMode, pos_emb: str
) -> Tensor:
    """Attention with explicit masks and distances, float64."""
    query, key, value = layer.heads(layer.query_key_value(hidden))
    method, distances = layer.positional, mapped_distances(mode)
    positions = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    match mode.scaling:
        case LogLength(length):
            query = query * (positions.log() / math.log(length)).clamp(min=1)[:, None]
        case YarnTemperature(factor):
            query = query * (0.1 * math.log(factor) + 1) ** 2
    base = 10_000.0
    if mode.dynamic_ntk is not None:
        growth = (
            mode.dynamic_ntk.factor * LENGTH / mode.dynamic_ntk.length - mode.dynamic_ntk.factor + 1
        )
        base *= growth ** (HEAD_SIZE / (HEAD_SIZE - 2))
    if pos_emb in (
        "rotary",
        "p_rope",
        "per_layer",
        "kerple_log_rotary",
        "dape_rotary",
        "dape_v2_rotary",
    ):
        products = rotated_products(
            query, key, distances, base, 3 if pos_emb == "p_rope" else HEAD_SIZE // 2
        )
    elif pos_emb == "xpos":
        products = xpos_products(query, key, distances, method.scale_base, base)
    else:
        query = query + method.content_bias if pos_emb == "transformer_xl" else query
        products = query @ key.transpose(-1, -2)
    scores, seen = products / math.sqrt(HEAD_SIZE), visible(mode.span)
    if pos_emb == "forgetting":
        sums = method.decay(hidden).double().cumsum(-1)
        scores = scores + sums[..., :, None] - sums[..., None, :]
    if pos_emb in ("kerple_log", "kerple_log_rotary"):
        scale, slope = (
            method.scalar(name).double()[:, None, None] for name in ("bias_p", "bias_a")
        )
        scores = scores - scale * (1 + slope * distances).log()
    if pos_emb == "cope":
        scores = cope_scores(method, scores, query, seen)
    elif "modify_scores" in method.hooks:
        # FIRE maps a query's position like its distance to the first token.
        queries = (positions - 1 if mode.distance_map is None else distances[:, 0])[:, None]
        scores = modified_scores(method, scores, query, distances, ~seen, queries)
    context = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value
    return layer.dense(context.transpose(1, 2).flatten(2))


SINKS = Span(window=20, sinks=4)
SCALED_SINKS = AttentionMode(SINKS, scaling=LogLength(16))
CLIPPED_SINKS = AttentionMode(SINKS, distance_map=Clip(9))
NTK = AttentionMode(dynamic_ntk=DynamicNtk(2.0, 32))
MODES = {
    "none": [AttentionMode(SINKS), AttentionMode(scaling=LogLength(16))],
    "kerple_log": [
        AttentionMode(SINKS, reindexed=True),
        AttentionMode(SINKS, distance_map=Clip(9), scaling=YarnTemperature(4.0)),
        AttentionMode(Span(window=30), distance_map=Log(9)),
        *(AttentionMode(distance_map=distance_map) for distance_map in (Leaky(9, 3.0), Linear(32))),
    ],
    "rotary": [
        AttentionMode(SINKS),
        AttentionMode(SINKS, reindexed=True, distance_map=Clip(9), scaling=LogLength(16)),
        AttentionMode(SINKS, reindexed=True, distance_map=Group(5, 9)),
        AttentionMode(Span(window=30), distance_map=Leaky(9, 3.0)),
        NTK,
        AttentionMode(SINKS, dynamic_ntk=DynamicNtk(1.0, 32)),
        *(AttentionMode(distance_map=distance_map) for distance_map in (Group(4, 9), Linear(32))),
    ],
    "p_rope": [NTK],
    "per_layer": [AttentionMode(SINKS, dynamic_ntk=DynamicNtk(2.0, 32))],
    "kerple_log_rotary": [AttentionMode(SINKS, reindexed=True, distance_map=Clip(9)), NTK],
    "dape_rotary": [
        CLIPPED_SINKS,
        AttentionMode(distance_map=Leaky(9, 3.0), dynamic_ntk=DynamicNtk(2.0, 32)),
    ],
    "dape_v2_rotary": [AttentionMode(SINKS, distance_map=Clip(9), dynamic_ntk=DynamicNtk(2.0, 32))],
    "forgetting": [SCALED_SINKS],
    "xpos": [AttentionMode(SINKS, reindexed=True), NTK, AttentionMode(distance_map=Group(4, 9))],
    "fire": [SCALED_SINKS, CLIPPED_SINKS, AttentionMode(Span(window=30), distance_map=Log(9))],
    "transformer_xl": [
        SCALED_SINKS,
        CLIPPED_SINKS,
        AttentionMode(Span(window=30), distance_map=Linear(32)),
    ],
    "cope": [SCALED_SINKS, AttentionMode(Span(window=20))],
    "dape_v2_alibi": [SCALED_SINKS, CLIPPED_SINKS],
}
OPTIONS = {
    "xpos": {"scale_base": 16.0},
    "fire": {"threshold": 5.0},
    "transformer_xl": {"init_std": 0.3},
    "dape_v2_alibi": {"kernel_size": 5},
}


def small_settings(pos_emb: str, **keys) -> ModelSettings:
    return model_settings(
        num_layers=1,
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        padded_vocab_size=64,
        max_positions=32,
        pos_emb=pos_emb,
        pos_emb_options=OPTIONS.get(pos_emb, {}),
        **keys,
    )


@pytest.mark.parametrize(
    ("pos_emb", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes]
)
def test_modes_equal_explicit_masks_and_distances(pos_emb, mode):
    """At once, and with a KV cache that drops keys, in chunks that begin before and after the
    window is full.
    """
    settings = small_settings(pos_emb)
    torch.manual_seed(0)
    model = GPT(settings).double().eval()
    layer = model.blocks[0].attention
    hidden = torch.randn(2, LENGTH, HEADS * HEAD_SIZE, dtype=torch.float64)
    mode = mode.at_length(LENGTH)
    with torch.no_grad():
        for parameter in layer.query_key_value.parameters():
            parameter.mul_(8)
        if pos_emb == "cope":
            layer.rpe.pos_emb.normal_()
        expected = expected_context(layer, hidden, mode, pos_emb)
        cache = model.new_cache(mode=mode).layers[0]
        parts = [
            layer(part, cache, mode)
            for part in hidden.split([2, 1, 15, 1, 1, 1, 5, 1, 100, 1, 1, LENGTH - 129], dim=1)
        ]
        # Angles, factors and tables are float32.
        torch.testing.assert_close(layer(hidden, None, mode), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0, atol=2e-5)
        trained = layer(hidden)
    assert not torch.allclose(expected, trained, atol=1e-3)


@pytest.mark.parametrize("pos_emb", methods_and_variants())
def test_without_sinks_and_maps_it_computes_what_the_backends_compute(pos_emb, monkeypatch):
    """Every method with grouped heads: in the mode of training, with a window, and with blocks."""
    settings = model_settings(
        num_layers=1,
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        num_kv_heads=1,
        padded_vocab_size=64,
        max_positions=32,
        pos_emb=pos_emb,
    )
    torch.manual_seed(0)
    layer = GPT(settings).double().eval().blocks[0].attention
    hidden = torch.randn(2, LENGTH, HEADS * HEAD_SIZE, dtype=torch.float64)
    modes = [AttentionMode(), AttentionMode(Span(window=20)), AttentionMode(Span(block=16))]
    with torch.no_grad():
        expected = [layer(hidden, mode=mode) for mode in modes]
        monkeypatch.setattr(AttentionMode, "is_explicit", lambda *_: True)
        for mode, context in zip(modes, expected, strict=True):
            torch.testing.assert_close(layer(hidden, mode=mode), context, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pos_emb", ["kerple_log", "cope"])
def test_scores_of_a_chunk_fit_into_the_budget(pos_emb, monkeypatch):
    """As on a GPU: the budget is the only limit of the chunks of queries."""
    budget, sizes, scores = 1 << 20, [], mode_attention._scores

    def recorded(*arguments, **options):
        result = scores(*arguments, **options)
        sizes.append(4 * result.numel())
        return result

    monkeypatch.setattr(mode_attention, "_scores", recorded)
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.modify_budget", lambda _: budget)
    monkeypatch.setattr("kerple.attention.backends.chunk_plan.MODIFY_MAX_ROWS", 1 << 30)
    method = build(pos_emb, ModelShape(HEADS, HEAD_SIZE, HEADS * HEAD_SIZE, 1, 32))
    query, key, value = torch.randn(3, 1, HEADS, 1000, HEAD_SIZE).unbind()
    with torch.no_grad():
        attend_in_mode(query, key, value, method, AttentionMode(SINKS))
    assert 0 < max(sizes) <= budget


def test_the_queries_are_the_last_positions_by_default():
    method = build("kerple_log", ModelShape(HEADS, HEAD_SIZE, HEADS * HEAD_SIZE, 1, 32))
    states, mode = torch.randn(1, HEADS, 40, HEAD_SIZE), AttentionMode(SINKS)
    expected = attend_in_mode(states, states, states, method, mode)[:, :, 30:]
    actual = attend_in_mode(states[:, :, 30:], states, states, method, mode)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    kept = torch.cat(
        (states[:, :, :4], states[:, :, 11:]), dim=2
    )  # a query at 30 sees the keys from 11 on
    actual = attend_in_mode(states[:, :, 30:], kept, kept, method, mode, start=30)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "mode", "keys", "start", "message"),
    [
        ("kerple_log", AttentionMode(SINKS), 40, 29, "10.*29.*40.*start=30"),
        ("kerple_log", AttentionMode(SINKS), 9, None, "10 .*-1 .* 9 keys"),
        ("kerple_log", AttentionMode(SINKS), 32, 30, "32 keys .*39: .* 4 to 11 .* 30"),
        ("kerple_log", AttentionMode(Span(window=20)), 28, 30, " 0 to 11 .* 30 .* 11"),
        ("kerple_log", AttentionMode(), 39, 30, " 0 to 0 .* 0"),
        ("forgetting", SCALED_SINKS, 10, None, "decay_sums"),
    ],
)
def test_keys_and_decays_that_do_not_fit(name, mode, keys, start, message):
    method = build(name, ModelShape(HEADS, HEAD_SIZE, HEADS * HEAD_SIZE, 1, 32))
    query, key = (torch.randn(1, HEADS, length, HEAD_SIZE) for length in (10, keys))
    for scale in (None, 0.5):
        with pytest.raises(ValueError, match=message):
            attend_in_mode(query, key, key, method, mode, start=start, scale=scale)


def test_an_empty_batch():
    method = build("kerple_log", ModelShape(HEADS, HEAD_SIZE, HEADS * HEAD_SIZE, 1, 32))
    states = torch.randn(0, HEADS, 10, HEAD_SIZE)
    assert (
        attend_in_mode(states, states, states, method, AttentionMode(SINKS)).shape == states.shape
    )


WIDE_SINKS = Span(window=124, sinks=4)
LINEAR_MEMORY = {
    "kerple_log": [
        *(AttentionMode(span) for span in (WIDE_SINKS, Span(window=128), Span(block=64))),
        AttentionMode(distance_map=Log(64), scaling=LogLength(128)),
    ],
    "rotary": [
        AttentionMode(WIDE_SINKS, reindexed=True, distance_map=Clip(64)),
        AttentionMode(distance_map=Leaky(64, 4.0)),
        AttentionMode(dynamic_ntk=DynamicNtk(1.0, 128), scaling=YarnTemperature(4.0)),
    ],
}


def attention_memory(mode: AttentionMode, length: int, pos_emb: str, backend: str = "auto") -> int:
    """The peak number of bytes that a layer allocates without gradients."""
    settings = small_settings(pos_emb, attention_backend=backend)
    layer, hidden = (
        GPT(settings).eval().blocks[0].attention,
        torch.randn(1, length, HEADS * HEAD_SIZE),
    )
    with torch.no_grad():
        return peak_memory(lambda: layer(hidden, mode=mode.at_length(length)))


@pytest.mark.parametrize(
    ("pos_emb", "mode"), [(name, mode) for name, modes in LINEAR_MEMORY.items() for mode in modes]
)
def test_memory_is_linear_in_the_length(pos_emb, mode):
    memory, twice = (attention_memory(mode, length, pos_emb) for length in (768, 1536))
    assert twice < 2.2 * memory


def test_memory_of_the_reference_is_quadratic():
    memory, twice = (
        attention_memory(AttentionMode(), length, "kerple_log", "reference")
        for length in (384, 768)
    )
    assert twice > 3.5 * memory
