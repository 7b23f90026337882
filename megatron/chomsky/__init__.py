"""The Chomsky-hierarchy benchmark: which tasks a small transformer solves beyond its training
length, by method.

Tasks and protocol are those of Deletang et al., "Neural Networks and the Chomsky Hierarchy" (arXiv
2207.02098). The model is the encoder with which DAPE (arXiv 2405.14722) compares positional methods
on these tasks.

`length_tasks` and `decoder` are tests of recall at controlled lengths, for decoders.
"""
