"""The optimizer's state of a checkpoint of the KERPLE release (GPT-NeoX of 2022).

`mp_rank_00_model_states.pt` holds, under "optimizer", the state dictionary of torch's Adam: states and parameters by
number, in the order of the model's parameters, which is that of the names in the layers' files. A parameter that the
layers share counts once, where it first stands. In half precision the release's optimizer keeps flat partitions, or
nothing in this file; such a state does not fit.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.layers import COMPUTED_BUFFERS, layer_files
from megatron.checkpoint.optimizer import MOMENTS
from megatron.checkpoint.storage import load_tensors

# Where the release's layers keep the positional method.
POSITIONAL = ("attention.rpe.", "position_embeddings.")


class ReleasedState:
    """Adam's state by the names of `megatron.checkpoint.optimizer`."""

    def __init__(self, entries: dict[str, dict[str, Any]]):
        self._entries = entries

    def __iter__(self):
        return iter(self._entries)

    def has(self, name: str, kind: str) -> bool:
        return name in self._entries and kind in self._entries[name]

    def step(self, name: str) -> int:
        return int(self._entries[name]["step"])

    def whole(self, name: str, kind: str, expected: torch.Size) -> Tensor:
        """The tensor, whose shape `read_optimizer` compared with the weight's."""
        return self._entries[name][kind]


def read_optimizer(saved: dict[str, Any], step: Path, tied_output: int | None) -> tuple[ReleasedState, str | None]:
    """The optimizer's state, and why it does not fit (None if it does)."""
    state = saved.get("optimizer")
    if state is None:
        return ReleasedState({}), "the checkpoint holds no optimizer state"
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        return ReleasedState({}), "the optimizer's state is not torch's Adam's"
    if len(state["param_groups"]) != 1:
        return ReleasedState({}), "the optimizer has several parameter groups, whose parameters have no names"
    files = layer_files(step)
    if any(len(paths) > 1 for paths in files.values()):
        return ReleasedState({}), "the checkpoint is tensor parallel"
    shapes = _parameter_shapes(files, tied_output)
    numbers = state["param_groups"][0]["params"]
    if len(numbers) != len(shapes):
        return ReleasedState({}), f"it has {len(numbers)} parameters, the weights' files {len(shapes)}"
    entries = {}
    for number, (name, shape) in zip(numbers, shapes.items(), strict=True):
        entry = state["state"].get(number, {})
        if any(kind not in entry or entry[kind].shape != shape for kind in MOMENTS) or "step" not in entry:
            return ReleasedState({}), f"its parameter {number} is not of the size of {name}"
        entries[name] = entry
    return ReleasedState(entries), None


def _parameter_shapes(files: dict[int, list[Path]], tied_output: int | None) -> dict[str, torch.Size]:
    shapes: dict[str, torch.Size] = {}
    for index, (path, *_) in files.items():
        for name, tensor in load_tensors(path, mapped=True).items():
            if name in COMPUTED_BUFFERS or index == tied_output:
                continue
            prefix = next((prefix for prefix in POSITIONAL if name.startswith(prefix)), None)
            shared = None if prefix is None else f"positional.{name.removeprefix(prefix)}"
            shapes.setdefault(shared or f"{index}.{name}", tensor.shape)
    return shapes
