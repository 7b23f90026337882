"""Tokenizers: Hugging Face `tokenizer.json` files, SentencePiece models, GPT-2's byte-level BPE,
and UTF-8 bytes.
"""
