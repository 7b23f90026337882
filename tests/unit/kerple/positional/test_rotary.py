"""Rotary positions, p-RoPE and xPos against complex multiplication in float64; scalings against
their sources.
"""

import math

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from kerple.attention import FULL, Span
from kerple.positional import PRope, Rotary, XPos
from kerple.positional.functional import default_frequencies
from tests.support.attention import assert_is_formula, attended, xpos_products

TRAINED = 128


def rotated_exactly(
    states: torch.Tensor, positions: torch.Tensor, base: float, rotated: int
) -> torch.Tensor:
    """Dimensions (i, i + r/2) as a complex number, times exp(i * position *
    base^(-2i/r)); float64.
    """
    states = states.double()
    half = rotated // 2
    pairs = torch.complex(states[..., :half], states[..., half:rotated])
    frequencies = torch.tensor(
        [base ** (-2 * i / rotated) for i in range(half)], dtype=torch.float64
    )
    angles = positions.double()[:, None] * frequencies
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, states[..., rotated:]), dim=-1)


@pytest.mark.parametrize(("base", "fraction"), [(10_000.0, 1.0), (10_000.0, 0.25), (500.0, 0.5)])
def test_values_and_gradients(base, fraction):
    torch.manual_seed(0)
    method = Rotary(head_size=16, base=base, fraction=fraction)
    rotated = int(16 * fraction)
    query_positions, key_positions = (
        torch.arange(60, 65),
        torch.tensor([0, 1, 2, 511, 512, 2048, 65_535, 65_536]),
    )
    # With the strides of the model: heads and positions are interleaved in memory.
    query = torch.randn(2, 5, 3, 16).transpose(1, 2).requires_grad_()
    key = torch.randn(2, 8, 3, 16).transpose(1, 2).requires_grad_()

    results = method.rotate(query, key, query_positions, key_positions)
    for states, positions, result in zip(
        (query, key), (query_positions, key_positions), results, strict=True
    ):
        exact = states.detach().double().requires_grad_()
        expected = rotated_exactly(exact, positions, base, rotated)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)
        upstream = torch.randn(result.shape)
        torch.testing.assert_close(
            torch.autograd.grad(result, states, upstream)[0].double(),
            torch.autograd.grad(expected, exact, upstream.double())[0],
            rtol=0,
            atol=1e-6,
        )


def test_second_derivatives():
    method = Rotary(head_size=4)
    states = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(3)

    def rotate_twice(states):
        query, key = method.rotate(states, states**2, positions, positions)
        return query * key

    assert torch.autograd.gradcheck(rotate_twice, states)
    assert torch.autograd.gradgradcheck(rotate_twice, states)


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    method = Rotary(head_size=32).bfloat16()
    states = torch.randn(1, 2, 4, 32).bfloat16()
    positions = torch.tensor([3, 300, 30_000, 65_536])
    result, _ = method.rotate(states, states, positions, positions)
    assert result.dtype == torch.bfloat16
    expected = rotated_exactly(states, positions, 10_000.0, 32)
    # The nearest bfloat16 is within 2^-8 of the value.
    assert ((result.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_positions_changed_in_place_miss_the_cache():
    method = Rotary(head_size=8)
    states = torch.randn(1, 1, 2, 8)
    positions = torch.arange(2)
    before, _ = method.rotate(states, states, positions, positions)
    positions += 7
    after, _ = method.rotate(states, states, positions, positions)
    assert not torch.equal(before, after)
    torch.testing.assert_close(
        after.double(), rotated_exactly(states, positions, 10_000.0, 8), rtol=0, atol=1e-6
    )


def transformers_config(kind: str, size: int, base: float, **parameters) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        hidden_size=2 * size,
        num_attention_heads=2,
        max_position_embeddings=TRAINED,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": base,
            "partial_rotary_factor": 1.0,
            **parameters,
        },
    )


def transformers_frequencies(
    kind: str, size: int, base: float, seq_len: int | None = None, **parameters
) -> tuple[torch.Tensor, float]:
    config = transformers_config(kind, size, base, **parameters)
    return ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=seq_len)


def assert_frequencies(method: Rotary, expected: torch.Tensor, scale: float) -> None:
    actual = torch.tensor(method.angles.frequencies, dtype=torch.float64)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-5, atol=0)
    assert method.angles.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize(("base", "factor"), [(10_000.0, 4.0), (500.0, 16)])
def test_frequencies_are_those_of_transformers(size, base, factor):
    assert_frequencies(
        Rotary(size, base=base, scaling="linear", factor=factor),
        *transformers_frequencies("linear", size, base, factor=factor),
    )
    # Dynamic scaling at a length of `factor` times that of training, where its own factor is 1, is
    # the NTK-aware base.
    dynamic = transformers_frequencies(
        "dynamic", size, base, seq_len=int(factor * TRAINED), factor=1.0
    )
    assert_frequencies(Rotary(size, base=base, scaling="ntk", factor=factor), *dynamic)
    for options in ({}, {"beta_fast": 8, "beta_slow": 2}, {"attention_factor": 1.5}):
        method = Rotary(size, TRAINED, base=base, scaling="yarn", factor=factor, **options)
        assert_frequencies(
            method,
            *transformers_frequencies(
                "yarn",
                size,
                base,
                factor=factor,
                original_max_position_embeddings=TRAINED,
                **options,
            ),
        )
    # Longer than the longest wavelength: the mixture ends at the last index. Shorter than the
    # shortest one, 2 pi: it begins and ends at the first.
    for trained in (10**6, 6):
        options = {"factor": factor, "original_max_position_embeddings": trained}
        method = Rotary(size, trained, base=4.0, scaling="yarn", factor=factor)
        assert_frequencies(method, *transformers_frequencies("yarn", size, 4.0, **options))
    from_model, explicit = (
        Rotary(
            size, maximum, base=base, scaling="yarn", factor=factor, trained_length=trained
        ).angles.frequencies
        for maximum, trained in ((TRAINED, None), (7, TRAINED))
    )
    assert explicit == from_model


@pytest.mark.parametrize("turns", [{}, {"low_freq_factor": 0.5, "high_freq_factor": 9}])
def test_llama3_frequencies_are_those_of_transformers(turns):
    """All three kinds of frequencies occur: kept, mixed and divided."""
    size, base = 64, 10_000.0
    complete = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **turns}
    method = Rotary(size, TRAINED, base=base, scaling="llama3", factor=8, **turns)
    parameters = {"factor": 8.0, "original_max_position_embeddings": TRAINED, **complete}
    assert_frequencies(method, *transformers_frequencies("llama3", size, base, **parameters))
    ratios = {
        round(a / b, 9)
        for a, b in zip(method.angles.frequencies, default_frequencies(size, base), strict=True)
    }
    assert {1.0, 0.125} < ratios


PARAMETERS = {
    "linear": {},
    "dynamic": {},
    "yarn": {"original_max_position_embeddings": TRAINED},
    "llama3": {
        "original_max_position_embeddings": TRAINED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("length", [TRAINED // 2, TRAINED, TRAINED + 1, 4 * TRAINED])
def test_cosines_and_sines_are_those_of_transformers(kind, length):
    """As computed by a model's own module, attention scaling of yarn included. Its angles are
    float32.
    """
    size, base = 32, 10_000.0
    theirs = GPTNeoXRotaryEmbedding(
        transformers_config(kind, size, base, factor=4.0, **PARAMETERS[kind])
    )
    expected = theirs(torch.zeros(1), torch.arange(length)[None])
    method = Rotary(size, TRAINED, base=base, scaling=kind, factor=4)
    positions = torch.arange(length)
    # Rotating (1, 0) gives (cos, sin); float32 angles below 512 differ by at most 512 * 2^-24.
    states = torch.cat((torch.ones(length, size // 2), torch.zeros(length, size // 2)), dim=1)[
        None, None
    ]
    rotated, _ = method.rotate(states, states, positions, positions)
    halves = torch.cat([part[0, :, : size // 2] for part in expected], dim=1)
    torch.testing.assert_close(rotated[0, 0], halves, rtol=0, atol=max(1e-6, length * 2**-24))
    angles = method.angles_at(positions)
    frequencies = angles.frequencies or default_frequencies(size, angles.base)
    torch.testing.assert_close(torch.tensor(frequencies), theirs.inv_freq, rtol=2e-6, atol=0)


def test_dynamic_scaling_depends_on_the_length():
    torch.manual_seed(0)
    states = torch.randn(1, 2, 3 * TRAINED, 16, dtype=torch.float64)
    positions = torch.arange(3 * TRAINED)
    method = Rotary(16, TRAINED, scaling="dynamic", factor=4)
    longer, _ = method.rotate(states, states, positions, positions)
    # As ntk with the factor of this length; shorter texts are not scaled, also afterwards.
    ntk, _ = Rotary(16, scaling="ntk", factor=4 * 3 - 3).rotate(
        states, states, positions, positions
    )
    torch.testing.assert_close(longer, ntk, rtol=0, atol=1e-6)
    plain, _ = Rotary(16).rotate(states, states, positions, positions)
    for first, last in ((0, TRAINED), (TRAINED - 9, TRAINED), (0, 5)):
        part = states[:, :, first:last]
        rotated, _ = method.rotate(part, part, positions[first:last], positions[first:last])
        assert torch.equal(rotated, plain[:, :, first:last])
    no_queries, _ = method.rotate(states[:, :, :0], states, positions[:0], positions)
    assert no_queries.shape == (1, 2, 0, 16)
    with pytest.raises(ValueError, match="trained_length 128"):
        method.rotate(
            states[:, :, :1], states[:, :, :1], torch.tensor([TRAINED]), torch.tensor([TRAINED])
        )


def test_what_inference_reads_of_scalings():
    plain, yarn, dynamic = (
        Rotary(16, TRAINED, scaling=scaling, factor=factor)
        for scaling, factor in ((None, None), ("yarn", 4.0), ("dynamic", 4.0))
    )
    assert yarn.score_scale == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert [each.length_dependent for each in (plain, yarn, dynamic)] == [False, False, True]
    assert [each.turns for each in (plain, yarn, dynamic)] == [True, True, False]
    # A base for longer texts is that of a copy, and replaces no other scaling.
    assert plain.stretched(2.0).angles.base == pytest.approx(10_000 * 2 ** (16 / 14))
    assert plain.angles.base == 10_000
    assert yarn.stretched(2.0) is None
    assert Rotary(2).stretched(2.0) is None  # a single frequency, the highest, stays
    positions = torch.arange(1, TRAINED + 1)
    states = torch.zeros(1, 1, TRAINED, 16)
    with pytest.raises(ValueError, match="trained_length"):
        dynamic.rotate(states, states, positions, positions)


POSITIONS = torch.tensor([0, 1, 2, 511, 65_536])


@pytest.mark.parametrize(
    ("size", "p", "kept"), [(16, 0.75, 6), (16, 0.25, 2), (10, 0.75, 3), (8, 1.0, 4)]
)
def test_only_the_highest_frequencies_rotate(size, p, kept):
    torch.manual_seed(0)
    states = torch.randn(2, 3, len(POSITIONS), size, requires_grad=True)
    exact = states.detach().double().requires_grad_()
    pairs = torch.complex(*exact.unflatten(-1, (2, size // 2)).unbind(-2))
    frequencies = 10_000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    frequencies[kept:] = 0
    angles = POSITIONS.double()[:, None] * frequencies
    pairs = pairs * torch.exp(1j * angles)
    expected = torch.cat((pairs.real, pairs.imag), dim=-1)

    rotated, _ = PRope(size, p=p).rotate(states, states, POSITIONS, POSITIONS)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=1e-6)
    upstream = torch.randn(rotated.shape)
    gradient, exact_gradient = (
        torch.autograd.grad(result, leaf, upstream.to(result.dtype))[0]
        for result, leaf in ((rotated, states), (expected, exact))
    )
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=0, atol=1e-6)
    unrotated = [*range(kept, size // 2), *range(size // 2 + kept, size)]
    assert torch.equal(rotated[..., unrotated], states[..., unrotated])


SIZE = 16


@pytest.mark.parametrize("scale_base", [1.0, 2.5, 512.0])  # segments of 4, 10 and 2,048 queries
def test_values_and_gradients_of_xpos(scale_base):
    method = XPos(SIZE, scale_base=scale_base)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        return xpos_products(query, key, position[:, None] - position, scale_base) / SIZE**0.5

    # Angles and factors are rounded to float32.
    assert_is_formula(
        method, scores, 2, SIZE, backends=("reference", "chunked", "sdpa", "auto"), atol=3e-6
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance", "span"),
    [
        (torch.float32, 1e-5, FULL),
        (torch.float16, 5e-3, FULL),
        (torch.bfloat16, 4e-2, FULL),
        (torch.float16, 5e-3, Span(window=700)),
        (torch.float16, 5e-3, Span(block=512)),
    ],
)
def test_65_536_positions_in_every_precision(dtype, tolerance, span):
    """The last queries of a long text, with keys cached after rotation: no overflow,
    no denormals.
    """
    torch.manual_seed(0)
    length, last, size = 65_536, 6, 16
    method = XPos(size)
    query, key, value = (torch.randn(1, 1, length, size).to(dtype) for _ in range(3))
    actual = attended("auto", method, query, key, value, last, span)
    position = torch.arange(length)
    distance = position[-last:, None] - position
    scores = xpos_products(query[:, :, -last:].double(), key.double(), distance, 512.0) / size**0.5
    first = torch.tensor([span.first_key(i) for i in range(length - last, length)])
    mask = (position > position[-last:, None]) | (position < first[:, None])
    expected = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value.double()
    assert actual.dtype == dtype
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


def test_factors_fit_half_precision_and_are_never_denormal():
    method, positions = XPos(64), torch.arange(65_536)
    for first in (65_536 - 2048, 65_535):
        queries, keys = method.scale_qk(
            torch.ones(1, 64), torch.ones(1, 64), positions[first:], positions
        )
        for values in (queries, keys):
            assert values.max() <= (0.4 / 1.4) ** -2 + 1e-4
            assert ((values == 0) | (values >= 9e-19)).all()
    # The farthest key's first pair has decayed to zero, its last pair hardly at all.
    assert keys[0, 0] == 0
    assert keys[0, -1] > 0.05
    assert keys[-1, 0] == 1


def test_what_build_takes_from_the_shape_is_checked():
    with pytest.raises(ValueError, match="even; got 5"):
        XPos(5)
    for scaling in ("yarn", "dynamic"):
        with pytest.raises(ValueError, match=f"scaling {scaling}.*trained_length"):
            Rotary(8, scaling=scaling, factor=2)
