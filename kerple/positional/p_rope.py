"""p-RoPE: rotary without its lowest frequencies (arXiv 2410.06205).

Of the d/2 frequencies base^(-2i/d) of a head, only the first, int(p d/2), rotate their pairs of dimensions. The other
pairs are not rotated, so their products do not depend on the distance: p = 1 is rotary, p = 0 no positions. Unlike with
`fraction` of `Rotary` (GPT-NeoX's rotary_pct), the remaining frequencies are those of the full head.
"""

from kerple.positional.functional import Angles, default_frequencies
from kerple.positional.registry import register
from kerple.positional.rotary import Rotary


@register("p_rope")
class PRope(Rotary):
    """Rotary with a share `p` of the frequencies, the highest ones. The paper uses 0.25 and 0.75.

    Raises ValueError if `p` is not in 0 ... 1, or leaves no frequency.
    """

    evaluation_options: tuple[str, ...] = ()

    def __init__(self, head_size: int, p: float = 0.75, base: float = 10_000.0):
        super().__init__(head_size, base=base)
        kept = int(p * head_size / 2)
        if not (0 < p <= 1 and kept):
            raise ValueError(
                f"p {p} must be above 0 and at most 1, and keep at least one of the {head_size // 2} frequencies "
                "(without any, use pos-emb none)"
            )
        frequencies = default_frequencies(head_size, base)
        self.angles = Angles(head_size, base, frequencies=(*frequencies[:kept], *[0.0] * (len(frequencies) - kept)))
