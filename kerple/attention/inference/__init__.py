"""Attention at inference, for texts longer than those of training: modes, their names, and the
computation.
"""
