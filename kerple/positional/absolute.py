"""Absolute positions, added to the token embeddings: sinusoidal (arXiv 1706.03762) and learned; and
none.

Legend: b batch, s tokens, e hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerple.positional.base import PositionalMethod, PositionsExceeded, draw
from kerple.positional.functional import Angles, positions_on
from kerple.positional.registry import register


@register("sinusoidal")
class Sinusoidal(PositionalMethod):
    """Adds the e/2 sines of position / base^(2i/e), followed by the cosines."""

    def __init__(self, hidden_size: int, base: float = 10_000.0):
        super().__init__()
        if hidden_size % 2:
            raise ValueError(f"sinusoidal positions need an even hidden size; got {hidden_size}")
        self.angles = Angles(hidden_size, base)

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = self.angles(positions, hidden.device)  # [s, e/2]
        return hidden + torch.cat((sine, cosine), dim=-1).to(hidden.dtype)


@register("learned")
class Learned(PositionalMethod):
    """Adds a learned vector per position: the rows of the table `weight`, `[max_positions, e]`."""

    # The checkpoints' name for the table; this method has no weight hook.
    weight: nn.Parameter  # type: ignore[assignment]

    def __init__(self, hidden_size: int, max_positions: int, init_std: float = 0.02):
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_positions, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        draw(self.weight, "normal", 0.0, self.init_std, generator)

    def embed(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Raises PositionsExceeded for a position beyond the table."""
        # Positions are on the CPU, so this does not wait for a GPU.
        last = -1
        if positions.numel():
            last = int(positions.max())
        if last >= len(self.weight):
            raise PositionsExceeded(
                f"learned positions end at {len(self.weight) - 1} (max-position-embeddings "
                f"{len(self.weight)}), but position {last} is needed; shorten the sequence, or use "
                "a relative method such as kerple_log"
            )
        vectors = F.embedding(positions_on(positions, self.weight.device), self.weight)  # [s, e]
        return hidden + vectors.to(hidden.dtype)


@register("none")
class NoPositions(PositionalMethod):
    """No positional information (NoPE): only the causal mask makes the model aware of order."""
