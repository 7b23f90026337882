"""Preparation of training data: corpora, downloads, readers of documents, and preprocessing to
`.bin/.idx`.
"""
