"""Rotary positions (RoPE, arXiv 2104.09864) in GPT-NeoX's half-split layout, ways to extend the
context, and variants.

The option `scaling` changes the frequencies, or the positions:

    linear   position interpolation (arXiv 2306.15595): all frequencies divided by `factor`
    ntk      NTK-aware: base * factor^(r / (r - 2)); the highest frequency stays, the lowest is
             divided by `factor`
    yarn     (arXiv 2309.00071): high frequencies stay; those with less than one turn in the trained
             length are divided by `factor`; those in between are interpolated linearly. The scores
             are scaled up with log(factor)
    llama3   Llama 3.1's (transformers, modeling_rope_utils.py): as yarn, but the mixture is linear
             in the number of turns in the trained length, and the scores are not scaled
    dynamic  ntk whose factor grows with the text: 1 up to the trained length T, then factor *
             length / T - (factor - 1) (transformers, modeling_rope_utils.py)

With dynamic scaling, all angles change with the length of the text, so keys of a shorter text
cannot be cached.

The variants:

    p_rope   rotary without its lowest frequencies (arXiv 2410.06205)
    xpos     rotary whose products decay with the distance, per pair of dimensions (LEX, arXiv
             2212.10554)

p-RoPE: of the d/2 frequencies base^(-2i/d), only the first, int(p d/2), rotate their pairs of
dimensions. The products of the other pairs do not depend on the distance: p = 1 is rotary, p = 0 no
positions. With `fraction` (GPT-NeoX's rotary_pct) instead, the remaining frequencies are those of a
smaller head.

xPos: dimensions 2i and 2i + 1 are rotated by position * 10000^(-2i/d). Their part of the product of
the query at n and the key at m is multiplied by zeta_i^((n - m) / scale_base), zeta_i = (i / (d/2)
+ 0.4) / 1.4. The authors multiply the query by zeta^(n / scale_base) and the key by zeta^(-m /
scale_base), which soon exceeds the range of half precision. Here keys are cached rotated but
unscaled, and both factors are computed in attention, relative to the middle of a segment of
queries: those of the queries stay near 1 and those of far keys go to zero, at any length.

Legend: b batch, h heads, s positions or queries, t keys, d head size, n or r rotated dimensions.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kerple.positional.base import PositionalMethod
from kerple.positional.functional import (
    Angles,
    DeviceConstant,
    LatestResults,
    default_frequencies,
    ntk_base,
    positions_on,
)
from kerple.positional.registry import register

# Scaling -> its options.
SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "trained_length", "beta_fast", "beta_slow", "attention_factor"),
    "llama3": ("factor", "trained_length", "low_freq_factor", "high_freq_factor"),
    "dynamic": ("factor", "trained_length"),
}
INTEGER_OPTIONS = ("trained_length",)
# Smaller factors of xPos are set to zero: they would produce denormal numbers, which are slow on a
# CPU.
MIN_FACTOR = 1e-18
# Length of a segment of xPos in units of scale_base; its factors are 0.4 / 1.4 to the power of -2
# ... 2.
SEGMENT = 4


class Rotation(PositionalMethod):
    """Turns pairs of dimensions of queries and keys.

    Members: `__init__`, which sets `angles`; and `turn`, for other pairs than (i, i + n/2).
    """

    turns = True
    angles: Angles

    def turn(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """States `[b, h, s, d]` after a rotation by angles with these cosines and sines `[s, n/2]`,
        in their dtype.
        """
        turned: Tensor = _HalfSplit.apply(states, cosine, sine)
        return turned

    def angles_at(self, positions: Tensor) -> Angles:
        """The angles for a text that ends with the last of these positions."""
        return self.angles

    def rotate(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = self.angles_at(query_positions)
        return (
            self.turn(query, *angles(query_positions, query.device)),  # [b, h, s, d]
            self.turn(key, *angles(key_positions, key.device)),  # [b, g, t, d]
        )

    def stretched(self, factor: float) -> PositionalMethod | None:
        if self.angles.size <= 2:
            return None
        # A shallow copy: it shares the parameters, and only its angles differ.
        method = copy.copy(self)
        method.angles = self.angles.stretched(factor)
        return method


class _HalfSplit(torch.autograd.Function):
    """Turn the dimensions (i, i + n/2) of `[b, h, s, d]` by angles with these cosines and sines
    `[s, n/2]`, in at least float32. Dimensions from n on stay.

    The gradient is the rotation by the opposite angle, so autograd does not save the states.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        # Computed in float32 at least, and rounded once.
        half = cosine.shape[-1]
        exact = states.to(torch.promote_types(states.dtype, torch.float32))
        first = exact[..., :half]
        second = exact[..., half : 2 * half]
        # In place in a copy, which is faster on a CPU than adding two products. Dimensions that are
        # not rotated (`fraction`) are copied.
        rotated = exact.clone(memory_format=torch.contiguous_format)
        rotated[..., :half].mul_(cosine).addcmul_(second, sine, value=-1)
        rotated[..., half : 2 * half].mul_(cosine).addcmul_(first, sine)
        return rotated.to(states.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _HalfSplit.apply(gradient, cosine, -sine), None, None


@register("rotary")
class Rotary(Rotation):
    """Rotates dimensions (i, i + r/2) of queries and keys by position * base^(-2i/r).

    The first r = `fraction` * d dimensions of each head are rotated (GPT-NeoX's rotary_pct). Any
    position is valid, including those beyond training. `scaling` and its options change no
    parameters, so a trained model can be evaluated with other values:

        linear, ntk, yarn, llama3, dynamic: factor
        yarn, llama3, dynamic: trained_length (default: max_positions)
        yarn: beta_fast 32, beta_slow 1, attention_factor 0.1 ln(factor) + 1
        llama3: low_freq_factor 1, high_freq_factor 4
    """

    evaluation_options: tuple[str, ...] = (
        "scaling",
        "factor",
        "trained_length",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "low_freq_factor",
        "high_freq_factor",
    )

    def __init__(
        self,
        head_size: int,
        max_positions: int | None = None,
        base: float = 10_000.0,
        fraction: float = 1.0,
        scaling: str | None = None,
        factor: float | None = None,
        trained_length: int | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        attention_factor: float | None = None,
        low_freq_factor: float | None = None,
        high_freq_factor: float | None = None,
    ):
        super().__init__()
        # The dimensions that are rotated, in pairs.
        self.rotated = int(head_size * fraction)
        if not 0 < self.rotated <= head_size or self.rotated % 2:
            raise ValueError(
                f"rotary rotates pairs of dimensions: head size {head_size} times fraction "
                f"{fraction} gives {self.rotated}, which is not an even number in 2 ... {head_size}"
            )

        # Options without an effect are rejected, like invalid ones.
        _check_options(
            scaling,
            {
                "factor": factor,
                "trained_length": trained_length,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
            },
        )
        # What the scaling needs beside its factor.
        if trained_length is None:
            trained_length = max_positions
        length = trained_length or 0
        if scaling is not None and "trained_length" in SCALINGS[scaling] and length < 1:
            raise ValueError(
                f"scaling {scaling} needs trained_length, the sequence length of training, at "
                "least 1"
            )
        if scaling in ("ntk", "dynamic") and self.rotated <= 2:
            raise ValueError(
                f"scaling {scaling} needs more than 2 rotated dimensions; got {self.rotated}"
            )

        # Frequencies and scale, with the defaults of the scaling's paper or code.
        self.angles = Angles(self.rotated, base)
        scaled: tuple[float, ...] | None = None
        scale = 1.0
        self.dynamic: tuple[float, int] | None = None  # factor and trained length
        factor = factor or 1.0
        if scaling == "linear":
            plain = default_frequencies(self.rotated, base)
            scaled = tuple(frequency / factor for frequency in plain)
        elif scaling == "ntk":
            scaled = default_frequencies(self.rotated, ntk_base(base, factor, self.rotated))
        elif scaling == "yarn":
            fast = _default(beta_fast, 32.0)
            slow = _default(beta_slow, 1.0)
            scaled = yarn_frequencies(self.rotated, base, factor, length, fast, slow)
            # Multiplies cosines and sines of both queries and keys.
            scale = _default(attention_factor, 0.1 * math.log(factor) + 1.0)
        elif scaling == "llama3":
            low = _default(low_freq_factor, 1.0)
            high = _default(high_freq_factor, 4.0)
            scaled = llama3_frequencies(self.rotated, base, factor, length, low, high)
        elif scaling == "dynamic":
            self.dynamic = factor, length

        # What inference modes and attention read.
        self.interpolated = scaling is not None
        self.score_scale = scale**2
        self.length_dependent = self.dynamic is not None
        self.turns = self.dynamic is None
        if scaled is not None:
            self.angles = Angles(self.rotated, base, frequencies=scaled, scale=scale)

    def stretched(self, factor: float) -> PositionalMethod | None:
        if self.interpolated:
            return None
        return super().stretched(factor)

    def angles_at(self, positions: Tensor) -> Angles:
        if self.dynamic is None or not len(positions):
            return self.angles
        # Only a text that begins at position 0 has its own length.
        factor, trained_length = self.dynamic
        length = int(positions[-1]) + 1
        if length <= trained_length:
            return self.angles
        if positions[0] > 0:
            raise ValueError(
                "scaling dynamic: the angles change with the length of the text, so beyond "
                f"trained_length {trained_length} it must be read at once, without a KV cache (to "
                "generate: recompute: true)"
            )
        return self.angles.stretched(factor * length / trained_length - (factor - 1))


def _check_options(scaling: str | None, options: Mapping[str, int | float | None]) -> None:
    """Raise ValueError for an unknown scaling, options of another scaling, and invalid values. None
    means not set.
    """
    # The options that have an effect.
    valid: tuple[str, ...] = ()
    if scaling is not None:
        if scaling not in SCALINGS:
            raise ValueError(f"scaling {scaling!r} is unknown; choose one of {', '.join(SCALINGS)}")
        valid = SCALINGS[scaling]
    for name, value in options.items():
        if value is None:
            continue
        if name not in valid:
            scalings = ", ".join(other for other, names in SCALINGS.items() if name in names)
            raise ValueError(
                f"{name} {value} has no effect with scaling {scaling!r}; it is an option of "
                f"{scalings}"
            )
        # Booleans are integers in Python.
        types: tuple[type, ...] = (int, float)
        description = "a finite number"
        if name in INTEGER_OPTIONS:
            types = (int,)
            description = "an integer"
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise ValueError(f"{name} {value!r} must be {description} >= 0")
    factor = options["factor"]
    if "factor" in valid and (factor is None or factor < 1):
        raise ValueError(
            f"scaling {scaling} needs factor, the ratio of the new length to the trained one, at "
            f"least 1; got {factor}"
        )


def _default(value: float | None, default: float) -> float:
    """An option, or its default."""
    if value is None:
        return default
    return value


def yarn_frequencies(
    size: int, base: float, factor: float, trained_length: int, beta_fast: float, beta_slow: float
) -> tuple[float, ...]:
    """YaRN's frequencies as in the authors' code.

    The mixture is linear in the frequency's index, between those with `beta_fast` and `beta_slow`
    turns in the trained length, rounded outwards to integer indices.
    """
    if not 0 < beta_slow < beta_fast:
        raise ValueError(
            f"scaling yarn needs 0 < beta_slow < beta_fast; got {beta_slow} and {beta_fast}"
        )

    def index(turns: float) -> float:
        return size * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    # From 0 at the last frequency that stays to 1 at the first that is divided.
    first = max(math.floor(index(beta_fast)), 0)
    last = min(math.ceil(index(beta_slow)), size - 1)
    width = (last - first) or 0.001
    mixed = []
    for i, frequency in enumerate(default_frequencies(size, base)):
        interpolated = min(max((i - first) / width, 0.0), 1.0)
        mixed.append(frequency * (1 - interpolated) + frequency / factor * interpolated)
    return tuple(mixed)


def llama3_frequencies(
    size: int, base: float, factor: float, trained_length: int, low_turns: float, high_turns: float
) -> tuple[float, ...]:
    """Llama 3.1's frequencies: those with at least `high_turns` turns in the trained length stay,
    those with at most `low_turns` are divided by `factor`, and those in between are mixed linearly
    in the number of turns.
    """
    if not 0 < low_turns < high_turns:
        raise ValueError(
            f"scaling llama3 needs 0 < low_freq_factor < high_freq_factor; got {low_turns}, "
            f"{high_turns}"
        )
    mixed = []
    for frequency in default_frequencies(size, base):
        # 1 from `high_turns` on, 0 up to `low_turns`.
        turns = trained_length * frequency / (2 * math.pi)
        kept = min(max((turns - low_turns) / (high_turns - low_turns), 0.0), 1.0)
        mixed.append(frequency * kept + frequency / factor * (1 - kept))
    return tuple(mixed)


@register("p_rope")
class PRope(Rotary):
    """Rotary with a share `p` of the frequencies, the highest ones. The paper uses 0.25 and 0.75.

    Raises ValueError if `p` is not in 0 ... 1, or leaves no frequency.
    """

    evaluation_options: tuple[str, ...] = ()

    def __init__(self, head_size: int, p: float = 0.75, base: float = 10_000.0):
        super().__init__(head_size, base=base)
        # A frequency of zero turns its pair by no angle.
        kept = int(p * head_size / 2)
        if not (0 < p <= 1 and kept):
            raise ValueError(
                f"p {p} must be above 0 and at most 1, and keep at least one of the "
                f"{head_size // 2} frequencies (without any, use pos-emb none)"
            )
        frequencies = default_frequencies(head_size, base)
        self.angles = Angles(
            head_size, base, frequencies=(*frequencies[:kept], *[0.0] * (len(frequencies) - kept))
        )


@register("xpos")
class XPos(Rotation):
    """The option `scale_base` is the distance at which the first pair of dimensions has decayed to
    0.4 / 1.4.
    """

    def __init__(self, head_size: int, base: float = 10_000.0, scale_base: float = 512.0):
        super().__init__()
        if head_size % 2:
            raise ValueError(
                f"xpos rotates pairs of dimensions, so the head size must be even; got {head_size}"
            )
        if not 1 <= scale_base < math.inf:
            raise ValueError(
                f"scale_base {scale_base} must be finite and at least 1 (a number of tokens)"
            )
        self.scale_base = float(scale_base)
        self.angles = Angles(head_size, base)
        half = head_size // 2
        zeta = (torch.arange(half, dtype=torch.float64, device="cpu") / half + 0.4) / 1.4
        self.log_zeta = DeviceConstant(zeta.log().tolist(), torch.float64)
        self._cache = LatestResults()

    @property
    def segment(self) -> int:
        return int(SEGMENT * self.scale_base)

    def turn(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        # Adjacent dimensions are a pair, unlike in the half-split layout.
        even, odd = states.unflatten(-1, (-1, 2)).unbind(-1)  # [b, h, s, d/2]
        rotated = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), dim=-1)
        return rotated.flatten(-2).to(states.dtype)

    def scale_qk(
        self, query: Tensor, key: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        query_factors, key_factors = self._cache.get(
            self._factors, query.device, query_positions, key_positions
        )
        return (query * query_factors).to(query.dtype), (key * key_factors).to(key.dtype)

    @torch.no_grad()
    def _factors(
        self, device: torch.device, queries: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The factors of queries `[s, d]` and keys `[t, d]` at their positions, float32."""
        # Relative to the middle of the queries, so that their own factors stay near 1.
        log_zeta = self.log_zeta(device) / self.scale_base  # [d/2]
        middle = (queries[0] + queries[-1]).double() / 2
        both = []
        for positions, sign in ((queries, 1), (keys, -1)):
            # zeta to the power of the distance to the middle, in units of scale_base.
            offsets = sign * (positions_on(positions, device, torch.float64) - middle)
            powers = (offsets[:, None] * log_zeta).exp()  # [s or t, d/2]
            powers = torch.threshold(powers, MIN_FACTOR, 0.0)
            both.append(powers.float().repeat_interleave(2, dim=-1))
        return both[0], both[1]
