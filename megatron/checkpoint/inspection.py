"""Contents of a checkpoint, read without building a model: sizes, positional parameters, damage.

Legend: h heads.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, build_layers
from megatron.checkpoint.directory import (
    LAYER_FILE,
    OPTIMIZER_FILES,
    iteration_of,
    layer_files,
    read_state_file,
)
from megatron.checkpoint.layers import (
    COMPUTED_BUFFERS,
    POSITIONAL_PREFIXES,
    merge_shards,
    tied_output,
)
from megatron.checkpoint.manifest import find_damage, read_manifest
from megatron.checkpoint.storage import CheckpointError, read_weights
from megatron.config.schema.model import ModelConfig

# Tensors that tensor parallelism splits: those of column- and row-parallel layers and of the
# vocabulary.
SLICED = re.compile(
    r"word_embeddings\.weight|final_linear\.weight"
    r"|attention\.query_key_value\.(weight|bias)|attention\.dense\.weight"
    r"|mlp\.(dense_h_to_4h|w1|w3)\.(weight|bias)|mlp\.(dense_4h_to_h|w2)\.weight"
)


def describe(step: Path, config: ModelConfig | None = None) -> dict[str, Any]:
    """A checkpoint as plain values: `step`, `iteration`, `manifest`, `files`, `bytes`,
    `parameters`, `layers`, `tensor_parallel`, `dtypes`, `optimizer`, `training`, `shape`; and, if
    `config` is given, `pos_emb` and `kernels`.

    config: the model section of the checkpoint's configuration. manifest: "whole", "none", or the
    damage. kernels: see `head_values`. Raises CheckpointError if a file cannot be read safely.
    """
    # Files, sizes and damage.
    layers = layer_files(step)
    sizes = {path: path.stat().st_size for path in step.rglob("*") if path.is_file()}
    layer_sizes = {}
    for index, files in layers.items():
        layer_sizes[str(index)] = sum(sizes.get(path, 0) for path in files)
    manifest = find_damage(step)
    if manifest is None:
        manifest = "whole"
        if read_manifest(step) is None:
            manifest = "none"

    # The optimizer's state.
    saved = read_state_file(step)
    optimizer_files = len(list(step.glob(OPTIMIZER_FILES)))
    optimizer = "none"
    if optimizer_files:
        optimizer = f"per parameter, in {optimizer_files} file{'s' * (optimizer_files > 1)}"
    elif isinstance(saved.get("optimizer"), dict):
        optimizer = "the release's"

    # A tied output is the embedding's weights again, and a shared method that of the first layer.
    own_layers, shared = layers, True
    if config is not None:
        own_layers = dict(layers)
        if (tied := tied_output(config)) is not None:
            own_layers.pop(tied, None)
        shared = config.build_on_meta()[0].shared
    counts, dtypes = _parameter_counts(own_layers, shared=shared)
    description = {
        "step": str(step),
        "iteration": saved.get("iteration") or iteration_of(step),
        "manifest": manifest,
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "parameters": sum(counts.values()),
        "layers": layer_sizes,
        "tensor_parallel": max(map(len, layers.values())),
        "dtypes": sorted(dtypes),
        "optimizer": optimizer,
        "training": saved.get("training"),
        "shape": saved.get("shape"),
    }
    if config is not None:
        description["pos_emb"] = config.pos_emb
        description["kernels"] = head_values(step, config)
    return description


def _parameter_counts(
    layers: dict[int, list[Path]], *, shared: bool
) -> tuple[dict[str, int], set[str]]:
    """(name -> elements, dtypes). A tensor of which layers or shards store copies is counted once.

    shared: all layers have the same positional parameters. Raises CheckpointError if a shard lacks
        a tensor.
    """
    counts: dict[str, int] = {}
    dtypes: set[str] = set()
    for index, paths in layers.items():
        shards = [read_weights(path) for path in paths]
        for name, tensor in shards[0].items():
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
            if name in COMPUTED_BUFFERS:
                continue
            for path, shard in zip(paths, shards, strict=True):
                if name not in shard:
                    raise CheckpointError(
                        f"{path}: lacks {name}, which {paths[0].name} has; the file is incomplete"
                    )
            copies = [shard[name] for shard in shards]
            key, sliced = f"{index}.{name}", SLICED.fullmatch(name) is not None
            if name.startswith(POSITIONAL_PREFIXES):
                # The release splits them by head, this project does not.
                sliced = not all(_same(tensor, copy) for copy in copies)
                if shared:
                    key = name
            counts[key] = tensor.numel()
            if sliced:
                counts[key] = sum(copy.numel() for copy in copies)
    return counts, dtypes


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def verified_methods(step: Path, config: ModelConfig) -> Iterator[tuple[str, PositionalMethod]]:
    """`positional_methods` of a checkpoint whose layer files are those that were saved. Raises
    CheckpointError if they are not.
    """
    damage = find_damage(step, names=LAYER_FILE)
    if damage is not None:
        raise CheckpointError(damage)
    return positional_methods(step, config)


def positional_methods(step: Path, config: ModelConfig) -> Iterator[tuple[str, PositionalMethod]]:
    """The positional methods of a checkpoint with their parameters: ("all layers", method) if the
    layers share one, or ("layer I", method) for each layer. Reads only the positional parameters.
    """
    files = layer_files(step)
    methods = build_layers(config.pos_emb, config.shape, **config.positional_options)
    blocks: Sequence[int] = range(2, config.num_layers + 2)
    if methods[0].shared:  # one that has a file
        blocks = [index for index in blocks if index in files][:1]
    for index, method in zip(blocks, methods, strict=False):
        if index not in files or "embed" in method.hooks:
            continue
        paths = files[index]
        shards = [read_weights(path) for path in paths]
        saved: dict[str, Tensor] = {}
        for name, parameter in method.named_parameters():
            for key in (prefix + name for prefix in POSITIONAL_PREFIXES):
                if key in shards[0]:
                    slices = [shard[key] for shard in shards]
                    merged = merge_shards(key, slices, parameter.shape, paths[0])
                    saved.setdefault(name, merged.float())
        if not saved and any(True for _ in method.parameters()):
            continue
        method.load_state_dict(method.state_dict() | saved)
        place = f"layer {index - 2}"
        if method.shared:
            place = "all layers"
        yield place, method


def head_values(step: Path, config: ModelConfig) -> dict[str, dict[str, list[float]]]:
    """ "all layers" or "layer I" -> parameter name -> its value for each head, as the method uses
    it.

    Methods with a bias add `effective_length`, the smallest distance whose bias is below -2 (Figure
    6 of the KERPLE paper), or 20,480 if there is none.
    """
    values_by_place: dict[str, dict[str, list[float]]] = {}
    for place, method in positional_methods(step, config):
        values = {name: values.tolist() for name, values in method.statistics().items()}
        if "bias" in method.hooks:
            values["effective_length"] = method.effective_length().tolist()
        if values:
            values_by_place[place] = values
    return values_by_place


def check_finite(step: Path) -> None:
    """Read all weights. Raises CheckpointError for the first tensor with NaN or infinity."""
    for paths in layer_files(step).values():
        for path in paths:
            for name, tensor in read_weights(path).items():
                count = int((~torch.isfinite(tensor)).sum())
                if count:
                    raise CheckpointError(
                        f"{path}: {name} contains {count} values that are NaN or infinite"
                    )
