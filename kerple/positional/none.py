"""No positions at all (NoPE): the causal mask alone tells the model about order."""

from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register


@register("none")
class NoPositions(PositionalMethod):
    """Every hook left as it is."""
