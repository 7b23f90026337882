"""Positional methods (KERPLE, arXiv 2205.09921, and its baselines), and attention that trains with them.

This package needs only torch (and Triton on a GPU), so it works in any PyTorch model:

    from kerple.attention import Attention
    from kerple.positional import KerpleLog
"""

__version__ = "0.1.0"
