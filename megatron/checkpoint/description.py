"""What a checkpoint's folder holds, read without building a model; and how two of them differ.

Legend: h heads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, build
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.layers import COMPUTED_BUFFERS, layer_files, load_layer_file
from megatron.checkpoint.manifest import find_damage, read_manifest
from megatron.checkpoint.optimizer import FILES as OPTIMIZER_FILES
from megatron.checkpoint.state import STATE_FILE
from megatron.checkpoint.storage import load_file
from megatron.model.settings import ModelSettings

POSITIONAL = ("attention.rpe.", "position_embeddings.")
LIMIT = 20_480


def describe(step: Path, settings: ModelSettings | None = None) -> dict[str, Any]:
    """A checkpoint as plain values: `step`, `manifest`, `files`, `bytes`, `parameters`, `layers`, `tensor_parallel`,
    `dtypes`, `optimizer`, `training`, and with `settings` (the model's, from its configuration) `kernels`.

    manifest: "whole", "none", or the damage. kernels: per method ("all layers" or "layer I") the parameters per head as
    used, and `effective_length`, the smallest distance whose bias is below -2 (LIMIT where there is none). Raises
    CheckpointError where a file cannot be read safely.
    """
    files = layer_files(step)
    everything = [path for path in step.rglob("*") if path.is_file()]
    damage = find_damage(step)
    saved = load_file(step / STATE_FILE) if (step / STATE_FILE).is_file() else {}
    shapes, dtypes = _tensors(files, per_layer=settings is not None and not _method(settings).shared)
    described = {
        "step": str(step),
        "iteration": int(saved.get("iteration", iteration_of(step))),
        "manifest": damage or ("none" if read_manifest(step) is None else "whole"),
        "files": len(everything),
        "bytes": sum(path.stat().st_size for path in everything),
        "parameters": sum(shapes.values()),
        "layers": {str(index): sum(path.stat().st_size for path in paths) for index, paths in files.items()},
        "tensor_parallel": max(map(len, files.values())),
        "dtypes": sorted(dtypes),
        "optimizer": _optimizer(step, saved),
        "training": saved.get("training"),
        "shape": saved.get("shape"),
    }
    if settings is not None:
        described["pos_emb"] = settings.pos_emb
        described["kernels"] = _kernels(files, settings)
    return described


def _method(settings: ModelSettings) -> PositionalMethod:
    return build(settings.pos_emb, settings.shape(), **dict(settings.pos_emb_options))


def _tensors(files: dict[int, list[Path]], *, per_layer: bool) -> tuple[dict[str, int], set[str]]:
    """(name -> elements over all shards, dtypes); a tensor that layers or shards hold copies of counts once.

    per_layer: the positional parameters of the layers are no copies of one another.
    """
    counts: dict[str, int] = {}
    dtypes: set[str] = set()
    for index, paths in files.items():
        shards = [load_layer_file(path) for path in paths]
        for name, tensor in shards[0].items():
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if name in COMPUTED_BUFFERS:
                continue
            shared = next((name for prefix in POSITIONAL if name.startswith(prefix)), None)
            # Replicas on the tensor-parallel ranks are equal; slices differ in what they hold.
            copies = shared or (len(shards) > 1 and all(torch.equal(tensor, shard[name]) for shard in shards[1:]))
            counts[f"{index}.{name}" if shared is None or per_layer else shared] = (
                tensor.numel() if copies else sum(shard[name].numel() for shard in shards)
            )
    return counts, dtypes


def _optimizer(step: Path, saved: dict[str, Any]) -> str:
    files = len(list(step.glob(OPTIMIZER_FILES)))
    if files:
        return f"per parameter, in {files} file{'s' * (files > 1)}"
    if saved.get("optimizer"):
        return "the release's"
    return "none"


def positional_methods(files: dict[int, list[Path]], settings: ModelSettings) -> Iterator[tuple[str, PositionalMethod]]:
    """The positional methods of a checkpoint's blocks with their parameters, nothing else of the model being read:
    ("all layers", method) where the layers share one, or ("layer I", method) for each.
    """
    for index, (path, *_) in files.items():
        if not 2 <= index < settings.num_layers + 2:
            continue
        method = _method(settings)
        parameters = _positional(load_layer_file(path), method)
        if method.embeds or (not parameters and list(method.parameters())):
            continue
        method.load_state_dict({**method.state_dict(), **parameters})
        yield ("all layers" if method.shared else f"layer {index - 2}"), method
        if method.shared:
            break


def _kernels(files: dict[int, list[Path]], settings: ModelSettings) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {}
    for place, method in positional_methods(files, settings):
        values = {name: values.tolist() for name, values in method.statistics().items()}
        if method.has_bias:
            values["effective_length"] = method.effective_length(LIMIT).tolist()
        if values:
            found[place] = values
    return found


def _positional(state: dict[str, Tensor], method: PositionalMethod) -> dict[str, Tensor]:
    own = {name for name, _ in method.named_parameters()}
    named = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        for prefix in POSITIONAL
        if name.startswith(prefix)
    }
    return {name: tensor.float() for name, tensor in named.items() if name in own}


def differences(first: dict[str, Any], second: dict[str, Any], first_step: Path, second_step: Path) -> dict[str, Any]:
    """What two checkpoints differ in: their described values, and per tensor of their layers' files the largest
    difference, as {"values": {name: [first, second]}, "tensors": {name: difference or text}}.
    """
    values = {
        name: [first.get(name), second.get(name)]
        for name in first.keys() | second.keys()
        if name not in ("step", "layers") and first.get(name) != second.get(name)
    }
    tensors: dict[str, Any] = {}
    files = layer_files(first_step), layer_files(second_step)
    for index in sorted(files[0].keys() | files[1].keys()):
        if index not in files[0] or index not in files[1]:
            tensors[f"layer {index}"] = f"only in {first_step if index in files[0] else second_step}"
            continue
        pairs = files[0][index], files[1][index]
        if len(pairs[0]) != len(pairs[1]):
            tensors[f"layer {index}"] = f"{len(pairs[0])} and {len(pairs[1])} tensor-parallel shards"
            continue
        for left_path, right_path in zip(*pairs, strict=True):
            left, right = (load_layer_file(path) for path in (left_path, right_path))
            for name in sorted(left.keys() | right.keys()):
                difference = _difference(left.get(name), right.get(name))
                if difference:
                    tensors[f"{left_path.name}/{name}"] = difference
    return {"values": dict(sorted(values.items())), "tensors": tensors}


def _difference(left: Tensor | None, right: Tensor | None) -> float | str:
    if left is None or right is None:
        return "only in the first" if right is None else "only in the second"
    if left.shape != right.shape:
        return f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
    return (left.double() - right.double()).abs().max().item() if left.numel() else 0.0
