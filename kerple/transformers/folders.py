"""Reading the folder of a method: of an adapter, or of a model that was saved with its methods."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from kerple.transformers.mask import MODULE

# The files of an adapter.
WEIGHTS, DESCRIPTION = "positional.safetensors", "positional.json"
# The keys of DESCRIPTION: those of `Methods.load_positional`, and three further ones.
KEYS = {
    "method",
    "class",
    "options",
    "own_positions",
    "layers",
    "num_layers",
    "num_heads",
    "head_size",
    "code",
    "sha256",
    "base_model",
    "samples",
}


def encoded(description: dict[str, Any]) -> Tensor:
    text = json.dumps(description, sort_keys=True)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decoded(description: Tensor) -> Any:
    return json.loads(bytes(description.tolist()))


def read_folder(
    folder: Path,
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, Tensor]]], list[Path]]:
    """The description and the weights of the methods in a folder, by the part of the model, "" in
    an adapter; and the files of a model that was saved with its methods.
    """
    if (folder / DESCRIPTION).is_file():
        config = folder / "config.json"
        if config.is_file() and MODULE in json.loads(config.read_text()):
            raise ValueError(
                f"{folder}: has both {DESCRIPTION} and a model that was saved with a method; "
                "remove one of them"
            )
        return {"": _read_adapter(folder)}, []

    # The files that from_pretrained reads; earlier ones may lie next to them.
    files = [folder / "model.safetensors"]
    index_file = folder / "model.safetensors.index.json"
    if not files[0].exists():
        if not index_file.exists():
            raise ValueError(
                f"{folder}: has neither {DESCRIPTION} nor {files[0].name} nor {index_file.name}; "
                "save the method, or the model with it, without `variant`"
            )
        index = json.loads(index_file.read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]

    weights: dict[str, dict[str, Tensor]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part, is_method, own = name.rpartition(f"{MODULE}.")
                if is_method:
                    of_part = weights.setdefault(part.removesuffix("."), {})
                    of_part[own] = file.get_tensor(name)
    if not weights:
        raise ValueError(f"{folder}: is a model that was saved without a method")
    parts = {}
    for part, tensors in weights.items():
        if "load_positional" not in tensors:
            raise ValueError(f"{folder}: has no description of its method; save the model again")
        description = decoded(tensors["load_positional"])
        if description["method"] is None:
            raise ValueError(
                f"{folder}: its method {description['class']} was given as an object; add such an "
                "object with use_positional, and read its weights with load_state_dict"
            )
        parts[part] = description, tensors
    return parts, files


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_positional` wrote. Raises ValueError if a file is damaged."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / DESCRIPTION}: is damaged ({error})") from error
    if not isinstance(description, dict) or description.keys() != KEYS:
        raise ValueError(
            f"{folder / DESCRIPTION}: must have exactly the keys {', '.join(sorted(KEYS))}"
        )
    # Weights and description are two files, which must be of the same call.
    data = (folder / WEIGHTS).read_bytes()
    if description.pop("sha256") != digest(description, data):
        raise ValueError(
            f"{folder / WEIGHTS}: is damaged, or was not saved together with this {DESCRIPTION}; "
            "save the method again"
        )
    return description, load(data)


def digest(description: dict[str, Any], weights: bytes) -> str:
    """SHA-256 (hexadecimal) of both files of an adapter."""
    text = json.dumps(description, sort_keys=True)
    return hashlib.sha256(text.encode() + weights).hexdigest()
