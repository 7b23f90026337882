"""No positional information (NoPE): only the causal mask makes the model aware of order."""

from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register


@register("none")
class NoPositions(PositionalMethod):
    """No hooks."""
