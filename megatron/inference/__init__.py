"""Inference: loading trained models and generating text."""

from megatron.inference.generation import Generation, generate
from megatron.inference.loading import load_model

__all__ = ["Generation", "generate", "load_model"]
