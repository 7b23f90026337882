"""Exported models, as transformers loads them: each is written once per process."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from megatron.convert import to_hugging_face
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.conversion import make_model, quiet


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()  # removed when the process ends


@cache
def export(pos_emb: str, *, inference_mode: str | None = None, **keys: Any) -> tuple[GPT, Path]:
    """A model with random weights, and the Hugging Face folder it is written to. Tests must not
    change either.
    """
    name = "_".join(
        [pos_emb, str(inference_mode), *(f"{key}_{value}" for key, value in keys.items())]
    )
    model, config = make_model(pos_emb, **keys)
    path = Path(_folder().name) / name
    tokenizer = TokenizerFiles("CharLevelTokenizer")
    to_hugging_face(
        model, config, path, tokenizer=tokenizer, inference_mode=inference_mode, report=quiet
    )
    return model, path


def load(path: Path, auto: Any = AutoModelForCausalLM, **keys: Any) -> Any:
    """The model in a folder, for evaluation."""
    return auto.from_pretrained(path, trust_remote_code=True, dtype=torch.float32, **keys).eval()
