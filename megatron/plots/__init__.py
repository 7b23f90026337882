"""Figures of biases, weights and effective lengths of checkpoints and positional methods."""
