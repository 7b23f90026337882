"""Optimizer state on disk: per parameter, by name, independent of the parallel layout.

Each rank writes the state it owns to `optimizer_rank_NNNNN.pt`:

    {"tensor_rank": T, "parameters": {NAME: {"shape": (...), "start": S, "step": N,
                                             "exp_avg": [n], "exp_avg_sq": [n], "master": [n]}}}

NAME is the layer index and the name in the layer's file ("2.attention.dense.weight"). A parameter
that layers share has one name ("positional.bias_p"). "shape" is the shape of tensor-parallel slice
T. The tensors contain elements S ... S+n-1 of the flattened slice: all of them, or the fragment
that ZeRO assigned to this rank. `megatron.optimizers` defines which tensors an optimizer has
("exp_avg" and "exp_avg_sq" are Adam's), and the shape of those that do not have the parameter's
(Adafactor's, and the scales "absmax1" and "absmax2" of 8-bit Adam); "master", the float32 weights,
is added if the model's weights have another precision. All are float32 except the uint8 codes
"state1" and "state2" of 8-bit Adam. Loading joins the fragments of a parameter and cuts them for
the current layout. An optimizer of whole parameters (`megatron.optimizers.whole_parameters`) has
each of them in one piece, on one rank; "shape" is that of the unsliced parameter.

Checkpoints of the KERPLE release (GPT-NeoX of 2022) keep the state dictionary of torch's Adam, by
parameter number, under "optimizer" in `mp_rank_00_model_states.pt`. `read_original_optimizer` maps
it to these names.

Legend: n elements of a fragment.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kerple.positional import outermost
from megatron.checkpoint.directory import OPTIMIZER_FILES, layer_files
from megatron.checkpoint.layers import (
    COMPUTED_BUFFERS,
    EMBEDDING,
    POSITIONAL_PREFIXES,
    merge_shards,
    open_layers,
    own_names,
    tied_output,
    weight_layers,
)
from megatron.checkpoint.state_dict import TrainingEngine
from megatron.checkpoint.storage import CheckpointError, load_tensors, read_weights
from megatron.model.parallel import full_shape, slice_for_rank
from megatron.optimizers.registry import get_step, initialize_state, set_step, state_shape
from megatron.optimizers.whole_parameters import Fragment, WholeParameterOptimizer


def optimizer_file(rank: int) -> str:
    return f"optimizer_rank_{rank:05d}.pt"


def parameter_names(
    layers: Mapping[int, nn.Module], tied_output: int | None
) -> dict[str, nn.Parameter]:
    """Name -> parameter; a shared parameter is listed once. `tied_output`: index of an output layer
    that uses the embedding's weights.
    """
    names: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for index, layer in layers.items():
        shared: dict[int, str] = {}
        for _, method in outermost(layer):
            if method.shared:
                for name, parameter in method.named_parameters():
                    shared[id(parameter)] = f"positional.{name}"
        for name, parameter in layer.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            own_name = f"{index}.{name}"
            if index == tied_output:
                own_name = "0.word_embeddings.weight"
            names[shared.get(id(parameter), own_name)] = parameter
    return names


def wrapped_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that `engine`, DeepSpeed's engine, was given."""
    optimizer: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return optimizer


def optimizer_fragments(engine: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Fragment]:
    """Parameter name -> the fragment that this rank owns. Parameters owned by other ranks are
    omitted.

    Finds them in torch's own optimizer, in DeepSpeed's ZeRO 1 and 2 and bf16 optimizers, and in
    ZeRO 3. `engine` is DeepSpeed's engine.
    """
    wrapper = engine.optimizer
    optimizer = wrapped_optimizer(engine)
    fragments: dict[str, Fragment] = {}
    parameter: Any  # with the attributes that DeepSpeed adds
    if engine.zero_optimization_partition_weights():
        # ZeRO 3 cuts each parameter into equal parts, the last one padded, and concatenates parts
        # into flat tensors.
        for name, parameter in parameters.items():
            sub_group, offset, _ = wrapper.grad_position[wrapper.get_param_id(parameter)]
            flat = wrapper.fp32_partitioned_groups_flat[sub_group]
            size = parameter.partition_numel()
            start = size * wrapper._get_param_partition_rank(parameter)
            size = min(size, parameter.ds_numel - start)
            if size > 0:
                group = optimizer.param_groups[wrapper.sub_group_to_group_id[sub_group]]
                master = flat.detach().narrow(0, offset, size)
                fragments[name] = Fragment(parameter.ds_shape, start, master, group, flat, offset)
    elif wrapper is optimizer:
        # torch's own optimizer updates the parameters themselves.
        groups = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                groups[id(parameter)] = group
        for name, parameter in parameters.items():
            group, master = groups[id(parameter)], parameter.data.view(-1)
            fragments[name] = Fragment(parameter.shape, 0, master, group, parameter, 0)
    else:
        # ZeRO 1 and 2 and the bf16 optimizer keep one flat float32 partition per parameter group,
        # which the optimizer updates.
        for name, parameter in parameters.items():
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            group, master = optimizer.param_groups[mapping.param_group_index], mapping.hp_fragment
            (flat,) = group["params"]
            start, offset = mapping.lp_fragment_address.start, mapping.hp_fragment_address.start
            fragments[name] = Fragment(parameter.shape, start, master.detach(), group, flat, offset)
    return fragments


def optimizer_state(engine: TrainingEngine) -> dict[str, Any]:
    """The contents of this rank's file. The tensors are the optimizer's own, not copies.

    A collective, with ZeRO, for optimizers of whole parameters: it gathers the float32 weights of
    split parameters.
    """
    parameters = parameter_names(engine.layers(), tied_output(engine.config.model))
    fragments = optimizer_fragments(engine.deepspeed, parameters)
    optimizer = wrapped_optimizer(engine.deepspeed)
    has_masters = engine.config.precision.dtype != "fp32"
    if isinstance(optimizer, WholeParameterOptimizer):
        fragments, optimizer = optimizer.owned(with_weights=has_masters), optimizer.inner
    entries = {}
    for name, fragment in fragments.items():
        state = optimizer.state.get(fragment.key, {})
        entry: dict[str, Any] = {
            "shape": tuple(fragment.shape),
            "start": fragment.start,
            "step": get_step(optimizer, fragment.group, fragment.key),
        }
        for kind in engine.config.optimizer.spec.state_tensors:
            if kind in state:
                entry[kind] = fragment.of(state[kind])
        if has_masters:
            entry["master"] = fragment.master
        entries[name] = entry
    return {"tensor_rank": engine.layout.tensor_rank, "parameters": entries}


@torch.no_grad()
def load_optimizer(engine: TrainingEngine, source: "SavedOptimizer", step: Path) -> None:
    """Fill this rank's part of the optimizer state from `source`, and the float32 weights from
    `source` or, if they are not in it, from the layer files of `step`. Raises CheckpointError if a
    parameter is missing.
    """
    # An optimizer of whole parameters has their state on one rank, the weights on all.
    layout = engine.layout
    parameters = parameter_names(engine.layers(), tied_output(engine.config.model))
    fragments = optimizer_fragments(engine.deepspeed, parameters)
    optimizer, states = wrapped_optimizer(engine.deepspeed), fragments
    if isinstance(optimizer, WholeParameterOptimizer):
        states, optimizer = optimizer.owned(with_weights=False), optimizer.inner
    state_tensors = engine.config.optimizer.spec.state_tensors
    engine.refresh_masters()

    # Check all names before any state changes.
    missing = [name for name in parameters if not source.has(name, "step")]
    if missing:
        raise CheckpointError(
            f"{step}: the optimizer files lack {missing[0]}; the checkpoint is incomplete"
        )

    def local_fragment(name: str, full: Tensor, fragment: Fragment) -> Tensor:
        if fragment.shape != full.shape:
            full = slice_for_rank(parameters[name], full, layout.tensor_rank)
        return full.reshape(-1).narrow(0, fragment.start, fragment.master.numel())

    # State, cut to this rank's slice and to the part it has in memory.
    for name, fragment in states.items():
        shape = full_shape(parameters[name], layout.tensor_size)
        saved_tensors = [kind for kind in state_tensors if source.has(name, kind)]
        if not saved_tensors:
            continue
        state = initialize_state(optimizer, fragment.key, saved_tensors)
        for kind in saved_tensors:
            kind_shape = torch.Size(state_shape(kind, shape))
            saved = source.tensor(name, kind, kind_shape)
            if kind_shape == shape:
                saved = local_fragment(name, saved, fragment)
            fragment.of(state[kind]).copy_(saved.view(-1))
        set_step(optimizer, fragment.group, fragment.key, source.step(name))

    # Float32 weights.
    for name, fragment in fragments.items():
        if source.has(name, "master"):
            shape = full_shape(parameters[name], layout.tensor_size)
            master = source.tensor(name, "master", shape)
            fragment.master.copy_(local_fragment(name, master, fragment))
    if engine.config.precision.dtype == "fp32":
        if hasattr(engine.deepspeed.optimizer, "update_lp_params"):
            engine.deepspeed.optimizer.update_lp_params()
        return

    # A checkpoint of a float32 run has no master weights: its layer files contain the exact
    # weights, which the model has rounded.
    places = {}
    for index, layer in weight_layers(engine.layers(), engine.config.model).items():
        for name, parameter in layer.named_parameters():
            places[id(parameter)] = index, name
    output = tied_output(engine.config.model)
    if output in engine.layers():  # in a pipeline, its weights are a copy of the embedding's
        for parameter in engine.layers()[output].parameters():
            places.setdefault(id(parameter), (0, EMBEDDING))
    by_layer: dict[int, list[str]] = {}
    for name in fragments:
        if not source.has(name, "master") and parameters[name].dtype != torch.float32:
            index, _ = places[id(parameters[name])]
            by_layer.setdefault(index, []).append(name)
    for index, names in by_layer.items():
        shards = open_layers(step, [index])[index]
        for name in names:
            _, file_name = places[id(parameters[name])]
            expected = full_shape(parameters[name], layout.tensor_size)
            slices = [shard[file_name] for shard in shards]
            full = merge_shards(file_name, slices, expected, step)
            fragments[name].master.copy_(local_fragment(name, full, fragments[name]))


class SavedOptimizer:
    """The optimizer state of a checkpoint.

    entries: parameter name -> tensor-parallel rank -> the fragments in all files.
    """

    def __init__(self, step: Path, entries: dict[str, dict[int, list[dict[str, Any]]]]):
        self._step, self._entries = step, entries

    def has(self, name: str, kind: str) -> bool:
        """Whether there is a state tensor `kind` (or "step", or "master") for this parameter."""
        return name in self._entries and kind in self._first(name)

    def step(self, name: str) -> int:
        """Optimizer steps that the parameter has received."""
        return int(self._first(name)["step"])

    def tensor(self, name: str, kind: str, expected: torch.Size) -> Tensor:
        """The unsliced tensor. Raises CheckpointError if fragments are missing or the sizes do not
        fit `expected`.
        """
        by_rank = self._entries[name]
        slices = [self._join(name, kind, by_rank[rank]) for rank in sorted(by_rank)]
        return merge_shards(name, slices, expected, self._step)

    def _first(self, name: str) -> dict[str, Any]:
        return next(iter(self._entries[name].values()))[0]

    def _join(self, name: str, kind: str, entries: list[dict[str, Any]]) -> Tensor:
        """One tensor-parallel slice from its fragments. Pipeline stages that share a parameter
        wrote equal ones.
        """
        entries = sorted(entries, key=lambda entry: entry["start"])
        shape = torch.Size(state_shape(kind, entries[0]["shape"]))
        first: Tensor = entries[0][kind]
        if first.numel() == shape.numel():
            return first.view(shape)
        joined, filled = torch.empty(shape.numel()), 0
        for entry in entries:
            if entry["start"] > filled:
                break
            end = entry["start"] + entry[kind].numel()
            joined[entry["start"] : end] = entry[kind]
            filled = max(filled, end)
        if filled != shape.numel():
            raise CheckpointError(
                f"{self._step}: the optimizer files contain {filled:,} of the {shape.numel():,} "
                f"elements of {name}; the file of a rank is missing"
            )
        return joined.view(shape)


def read_optimizer(step: Path) -> SavedOptimizer:
    """The optimizer files of a checkpoint of this project. Raises CheckpointError if damaged."""
    entries: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(step.glob(OPTIMIZER_FILES)):
        content = load_tensors(path)
        for name, entry in content["parameters"].items():
            entries.setdefault(name, {}).setdefault(content["tensor_rank"], []).append(entry)
    return SavedOptimizer(step, entries)


def read_original_optimizer(
    saved: Mapping[str, Any], step: Path, tied_output: int | None, state_tensors: tuple[str, ...]
) -> tuple[SavedOptimizer, str | None]:
    """The optimizer state of a released checkpoint, and why it cannot be used (None if it can).

    Parameters are numbered in the order of the model, which is the order of names in the layer
    files; a parameter that layers share is counted once, where it first occurs. In half precision
    the release stores flat partitions, or nothing in this file. saved: the contents of
    `mp_rank_00_model_states.pt`.
    """
    # What fits no single Adam on one rank.
    empty, state = SavedOptimizer(step, {}), saved.get("optimizer")
    if state is None:
        return empty, "the checkpoint has no optimizer state"
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return empty, "the optimizer state is not that of torch's Adam"
    if len(state["param_groups"]) != 1:
        return empty, "the optimizer has several parameter groups, whose parameters have no names"
    files = layer_files(step)
    if any(len(paths) > 1 for paths in files.values()):
        return empty, "the checkpoint is tensor parallel"

    # Parameter name -> shape, in the order of the numbers.
    shapes: dict[str, torch.Size] = {}
    for index, (path, *_) in files.items():
        for name, tensor in own_names(read_weights(path)).items():
            if name in COMPUTED_BUFFERS or index == tied_output:
                continue
            if name == "attention.query_key_value.weight" and len(tensor) != 3 * tensor.shape[1]:
                return empty, "num_kv_heads: the rows of query_key_value are in GPT-NeoX's order"
            key = f"{index}.{name}"
            for prefix in POSITIONAL_PREFIXES:
                if name.startswith(prefix):
                    key = f"positional.{name.removeprefix(prefix)}"
            shapes.setdefault(key, tensor.shape)
    numbers = state["param_groups"][0]["params"]
    if len(numbers) != len(shapes):
        return empty, f"it has {len(numbers)} parameters, but the layer files have {len(shapes)}"

    # The state under these names.
    entries = {}
    for number, (name, shape) in zip(numbers, shapes.items(), strict=True):
        entry = state["state"].get(number, {})
        fits = all(kind in entry and entry[kind].shape == shape for kind in state_tensors)
        if not fits or "step" not in entry:
            return empty, f"its parameter {number} does not have the shape of {name}"
        entries[name] = {0: [{**entry, "shape": shape, "start": 0}]}
    return SavedOptimizer(step, entries), None
