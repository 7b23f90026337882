"""The optimizers, from torch and other libraries: how they are built, and which state a checkpoint
has.
"""
