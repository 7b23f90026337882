"""Tensors of a Hugging Face folder, and what both directions do with a model's tensors."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file as load_safetensors
from torch import Tensor

from megatron.checkpoint.convert.names import COMPUTED, SYNONYMS, layers_with_weights, names_of
from megatron.checkpoint.convert.tokenizer_files import read_json
from megatron.checkpoint.layers import tensors_of
from megatron.checkpoint.storage import CheckpointError, load_tensors
from megatron.model.gpt import GPT

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def import_transformers() -> Any:
    """The transformers library. Raises CheckpointError if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "converting to or from Hugging Face compares with the transformers library, which is not installed; "
            "install requirements/eval.txt"
        ) from error
    return transformers


def rounded(model: GPT, dtype: torch.dtype) -> GPT:
    """A float32 copy of the model with its weights rounded to `dtype`."""
    return copy.deepcopy(model).to(dtype).float().eval()


def hugging_face_tensors(model: GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's tensors under Hugging Face's names; floating-point ones in `dtype`."""
    layers = layers_with_weights(model)
    return {theirs: cast(tensors_of(layers[index])[ours], dtype) for (index, ours), theirs in names_of(model).items()}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy, in `dtype` if it is floating-point."""
    target = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(dtype=target, device="cpu", copy=True).contiguous()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder: one file or several with an index, safetensors before pickled ones, which
    are read as tensors alone. Names are those of `names.py`; computed tensors are left out.

    Raises CheckpointError if there are none, a file is missing or damaged, or holds anything but tensors.
    """
    files = _weight_files(folder)
    found: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in _read(path).items():
            if not torch.is_tensor(tensor):
                raise CheckpointError(f"{path}: {name} is not a tensor")
            if not COMPUTED.fullmatch(name):
                found[SYNONYMS.get(name, name)] = tensor
    return found


def _weight_files(folder: Path) -> list[Path]:
    for name in (SAFETENSORS, PICKLED):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            parts = sorted(set(read_json(index).get("weight_map", {}).values()))
            for part in parts:
                if Path(part).name != part:
                    raise CheckpointError(f"{index}: names {part!r}, which is not a file of this folder")
            return [folder / part for part in parts]
    raise CheckpointError(f"{folder}: has no {SAFETENSORS} or {PICKLED}, so there are no weights to convert")


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return load_tensors(path)
    try:
        return load_safetensors(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read, it is missing or damaged ({error})") from error


@torch.no_grad()
def fill(model: GPT, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors under Hugging Face's names into the model. Raises CheckpointError for a tensor that is missing, has
    another shape, or has no place in the model.
    """
    names = names_of(model)
    allowed = {*names.values(), *([] if not model.settings.tied_embeddings else ["embed_out.weight"])}
    missing = [name for name in dict.fromkeys(names.values()) if name not in tensors]
    extra = [name for name in tensors if name not in allowed]
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"holds {_some(extra)}, which the model of its config.json has not"] if extra else []
        raise CheckpointError(f"{where}: {' and '.join(parts)}")
    layers = layers_with_weights(model)
    for (index, ours), theirs in names.items():
        target, value = tensors_of(layers[index])[ours], tensors[theirs]
        if target.shape != value.shape:
            raise CheckpointError(
                f"{where}: {theirs} has shape {tuple(value.shape)}, but config.json makes it {tuple(target.shape)}"
            )
        target.copy_(value)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
