"""Kernelized relative positional embeddings (KERPLE, arXiv 2205.09921), their baselines, and attention to train them.

This package needs only torch (and Triton on a GPU), so it can be used in any PyTorch model:

    from kerple.attention import Attention
    from kerple.positional import KerpleLog
"""
