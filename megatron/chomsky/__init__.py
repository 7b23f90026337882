"""The Chomsky-hierarchy benchmark: what positional methods let a small transformer compute beyond its training length.

Tasks and protocol are those of Deletang et al., "Neural Networks and the Chomsky Hierarchy" (arXiv 2207.02098); the
model is the one with which DAPE (arXiv 2405.14722) compares positional methods on them.
"""

from megatron.chomsky.tasks import TASKS, Batch, Task

__all__ = ["TASKS", "Batch", "Task"]
