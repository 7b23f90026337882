"""xPos against complex numbers in float64, at any length and precision."""

import pytest
import torch

from kerple.attention import FULL, Span
from kerple.positional import XPos
from tests.support.attention import assert_is_formula, attended

SIZE = 16


def products(query: torch.Tensor, key: torch.Tensor, scale_base: float, queries: torch.Tensor, keys: torch.Tensor):
    """Re(q conj(k) e^(i theta (n - m))) zeta^((n - m) / scale_base), summed over the pairs (2i, 2i + 1); no sqrt(d)."""
    size = query.shape[-1]
    distance = queries.double()[:, None] - keys.double()
    total = 0.0
    for pair in range(size // 2):
        theta = 10_000.0 ** (-2 * pair / size)
        zeta = (pair / (size / 2) + 0.4) / 1.4
        q = torch.complex(query[..., 2 * pair], query[..., 2 * pair + 1])
        k = torch.complex(key[..., 2 * pair], key[..., 2 * pair + 1])
        rotated = q[..., :, None] * k[..., None, :].conj() * torch.polar(torch.ones_like(distance), theta * distance)
        total = total + rotated.real * zeta ** (distance.clamp(min=0) / scale_base)
    return total


@pytest.mark.parametrize("scale_base", [1.0, 2.5, 512.0])  # segments of 4, 10 and 2,048 queries
def test_values_and_gradients(scale_base):
    method = XPos(SIZE, scale_base=scale_base)

    def scores(query, key, visible):
        position = torch.arange(key.shape[2])
        return products(query, key, scale_base, position, position) / SIZE**0.5

    # Angles and factors are rounded to float32.
    assert_is_formula(method, scores, 2, SIZE, backends=("reference", "chunked", "sdpa", "auto"), atol=3e-6)


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
    """The last queries of a long text, with keys cached after rotation: no overflow, no denormals."""
    torch.manual_seed(0)
    length, last, size = 65_536, 6, 16
    method = XPos(size)
    query, key, value = (torch.randn(1, 1, length, size).to(dtype) for _ in range(3))
    actual = attended("auto", method, query, key, value, last, span)
    position = torch.arange(length)
    scores = products(query[:, :, -last:].double(), key.double(), 512.0, position[-last:], position) / size**0.5
    first = torch.tensor([span.first_key(i) for i in range(length - last, length)])
    mask = (position > position[-last:, None]) | (position < first[:, None])
    expected = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value.double()
    assert actual.dtype == dtype
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


def test_factors_fit_half_precision_and_are_never_denormal():
    method = XPos(64)

    def factors(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the queries first ... last, and of all keys up to last."""
        positions = torch.arange(last + 1)
        return method.scale_qk(torch.ones(last + 1 - first, 64), torch.ones(last + 1, 64), positions[first:], positions)

    for first, last in ((0, 2047), (65_536 - 2048, 65_535), (65_535, 65_535)):
        for values in factors(first, last):
            assert values.max() <= (0.4 / 1.4) ** -2 + 1e-4
            assert ((values == 0) | (values >= 9e-19)).all()
    # The farthest key's first pair has decayed to zero, its last pair hardly at all.
    keys = factors(65_535, 65_535)[1]
    assert keys[0, 0] == 0
    assert keys[0, -1] > 0.05
    assert keys[-1, 0] == 1


def test_training_after_an_evaluation_in_inference_mode():
    method = XPos(SIZE)
    states = [torch.randn(1, 1, 6, SIZE) for _ in range(3)]
    with torch.inference_mode():
        expected = attended("auto", method, *states, 6, FULL)
    actual = attended("auto", method, *(state.requires_grad_() for state in states), 6, FULL)
    actual.sum().backward()
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("size", "options", "message"), [(5, {}, "even; got 5"), (4, {"scale_base": 0.5}, "scale_base 0.5")]
)
def test_invalid_options_are_rejected(size, options, message):
    with pytest.raises(ValueError, match=message):
        XPos(size, **options)


def test_factors_of_transformed_functions_are_not_cached():
    method, positions = XPos(4), torch.arange(3)

    def scaled(states):
        return method.scale_qk(states, states, positions, positions)[0].sum()

    torch.func.grad(scaled)(torch.ones(1, 1, 3, 4))
    assert not method._cache
    scaled(torch.ones(1, 1, 3, 4))
    assert len(method._cache) == 1
