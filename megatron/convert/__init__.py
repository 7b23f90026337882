"""Conversion of checkpoints to and from Hugging Face.

A conversion writes to a temporary folder, reads the result back, compares its logits with the
source's, and gives the folder its final name only if they agree.
"""

from megatron.convert.hugging_face import from_hugging_face, to_hugging_face

__all__ = ["from_hugging_face", "to_hugging_face"]
