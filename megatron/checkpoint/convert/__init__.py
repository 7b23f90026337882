"""Checkpoints in and out: Hugging Face folders, and the KERPLE release's layout and archives.

A conversion takes a model (`megatron.inference.load_model` gives it) or makes one, writes to a folder of another name,
compares logits of the source and of what was written, and only then gives the folder its name.
"""

from megatron.checkpoint.convert.hugging_face_export import to_hugging_face
from megatron.checkpoint.convert.hugging_face_import import from_hugging_face
from megatron.checkpoint.convert.release import to_release

__all__ = ["from_hugging_face", "to_hugging_face", "to_release"]
