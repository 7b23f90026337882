"""Positional methods (KERPLE, arXiv 2205.09921, and its baselines), and attention that trains with
them.

This package needs only torch (and Triton on a GPU), so it works in any PyTorch model:

    from kerple import Attention, KerpleLog

    attention = Attention(KerpleLog(num_heads=4))
    context = attention(query, key, value)  # [batch, heads, length, head size]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerple.attention import Attention as Attention
    from kerple.attention import attend as attend
    from kerple.positional import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Attention`, `attend` and the positional methods. They are imported on first use, because
    torch takes seconds.
    """
    if name in ("Attention", "attend"):
        return getattr(import_module("kerple.attention"), name)
    if not name.startswith("_"):
        found = getattr(import_module("kerple.positional"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
