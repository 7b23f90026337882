"""The optimizer's state on disk: per parameter, by name, in a form that no parallel layout is part of.

Each rank writes what it owns to `optimizer_rank_NNNNN.pt`:

    {"tensor_rank": T, "parameters": {NAME: {"shape": (...), "start": S, "step": N, "exp_avg": [n], "exp_avg_sq": [n],
                                             "master": [n]}}}

NAME is the layer's index and the name in the layer's file ("2.attention.dense.weight"); a parameter that several layers
share has one name ("positional.bias_p"). "shape" is that of the tensor-parallel slice T, flattened; the tensors are
float32 and hold its elements S ... S+n-1: all of them, or what ZeRO gave this rank. "master" is there where the weights
themselves are not float32. Any other layout is served by putting the pieces of a parameter together and cutting it
anew.

Legend: n elements of a piece.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kerple.positional import outermost
from megatron.checkpoint.layers import merge_shards
from megatron.checkpoint.storage import CheckpointError, load_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
FILES = "optimizer_rank_*.pt"


def rank_file(rank: int) -> str:
    return f"optimizer_rank_{rank:05d}.pt"


def parameter_names(layers: dict[int, nn.Module], tied_output: int | None) -> dict[str, nn.Parameter]:
    """Name -> parameter, each parameter once. `tied_output`: index of the output layer when its weights are the
    embedding's.
    """
    names: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for index, layer in layers.items():
        shared = {
            id(parameter): f"positional.{name}"
            for _, method in outermost(layer)
            if method.shared
            for name, parameter in method.named_parameters()
        }
        for name, parameter in layer.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            own = "0.word_embeddings.weight" if index == tied_output else f"{index}.{name}"
            names[shared.get(id(parameter), own)] = parameter
    return names


@dataclass(frozen=True)
class Piece:
    """What this rank's optimizer holds of a parameter: elements `start` ... of its flattened slice.

    master: float32 view of the weights that the optimizer works on. group: the optimizer's parameter group. key: the
    tensor under which the optimizer keeps its state, and offset: where in it this piece begins.
    """

    shape: torch.Size
    start: int
    master: Tensor
    group: dict[str, Any]
    key: Tensor
    offset: int

    @property
    def numel(self) -> int:
        return self.master.numel()


class OptimizerPieces:
    """This rank's part of the optimizer's state, under whichever of DeepSpeed's optimizers runs: none (torch's own),
    ZeRO 1 and 2, bf16's, or ZeRO 3.
    """

    def __init__(self, engine: Any, names: dict[str, nn.Parameter]):
        """`engine` is DeepSpeed's engine, `names` the rank's parameters."""
        wrapper = engine.optimizer
        self.base: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        if engine.zero_optimization_partition_weights():
            pieces = {name: _zero3_piece(wrapper, self.base, parameter) for name, parameter in names.items()}
        elif wrapper is self.base:
            groups = {id(parameter): group for group in self.base.param_groups for parameter in group["params"]}
            pieces = {
                name: Piece(parameter.shape, 0, parameter.data.view(-1), groups[id(parameter)], parameter, 0)
                for name, parameter in names.items()
            }
        else:
            pieces = {name: _zero_piece(self.base, parameter) for name, parameter in names.items()}
        self.pieces: dict[str, Piece] = {name: piece for name, piece in pieces.items() if piece is not None}

    def state(self, *, with_master: bool) -> dict[str, dict[str, Any]]:
        """Name -> what the file holds of it; the tensors are the live ones."""
        return {name: self._state(piece, with_master) for name, piece in self.pieces.items()}

    def _state(self, piece: Piece, with_master: bool) -> dict[str, Any]:
        held = self.base.state.get(piece.key, {})
        entry: dict[str, Any] = {"shape": tuple(piece.shape), "start": piece.start}
        entry["step"] = int(held.get("step", piece.group.get("step", 0)))
        entry |= {name: self._view(held[name], piece) for name in MOMENTS if name in held}
        if with_master:
            entry["master"] = piece.master
        return entry

    @torch.no_grad()
    def load(self, whole: Callable[[str, str], Tensor | None], step: Callable[[str], int]) -> None:
        """Fill in place. `whole(name, kind)` gives this rank's slice of a parameter's "exp_avg", "exp_avg_sq" or
        "master", unflattened, or None where there is none; `step(name)` the steps that the parameter has seen.
        """
        for name, piece in self.pieces.items():
            for kind in MOMENTS:
                if (value := whole(name, kind)) is not None:
                    self._view(self._held(piece)[kind], piece).copy_(_cut(value, piece))
                    self._set_step(piece, step(name))
            if (value := whole(name, "master")) is not None:
                piece.master.copy_(_cut(value, piece))

    def _held(self, piece: Piece) -> dict[str, Any]:
        """The state under the piece's key; Adam makes it at its first step, and resuming comes before that."""
        held = self.base.state[piece.key]
        for name in MOMENTS:
            if name not in held:
                held[name] = torch.zeros_like(piece.key, memory_format=torch.preserve_format)
        return held

    def _set_step(self, piece: Piece, step: int) -> None:
        if isinstance(self.base, torch.optim.Adam):
            # On the parameters' device, as the fused implementation keeps it.
            self.base.state[piece.key]["step"] = torch.tensor(float(step), device=piece.key.device)
        else:
            piece.group["step"] = step  # apex counts in the group

    @staticmethod
    def _view(tensor: Tensor, piece: Piece) -> Tensor:
        return tensor.detach().view(-1).narrow(0, piece.offset, piece.numel)


def _cut(value: Tensor, piece: Piece) -> Tensor:
    return value.reshape(-1).narrow(0, piece.start, piece.numel)


def _zero_piece(base: torch.optim.Optimizer, parameter: nn.Parameter) -> Piece | None:
    """ZeRO 1 and 2 and the bf16 optimizer keep flat float32 partitions, one per parameter group."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None  # all of it is on other ranks
    group = base.param_groups[mapping.param_group_index]
    (flat,) = group["params"]
    return Piece(
        parameter.shape, mapping.lp_fragment_address.start, mapping.hp_fragment.detach(), group, flat,
        mapping.hp_fragment_address.start,
    )  # fmt: skip


def _zero3_piece(wrapper: Any, base: torch.optim.Optimizer, parameter: nn.Parameter) -> Piece | None:
    """ZeRO 3 cuts each parameter into equal parts, the last one padded, and keeps flat partitions of several."""
    sub_group, offset, _ = wrapper.grad_position[wrapper.get_param_id(parameter)]
    flat = wrapper.fp32_partitioned_groups_flat[sub_group]
    part = parameter.partition_numel()
    start = part * wrapper._get_param_partition_rank(parameter)
    numel = min(part, parameter.ds_numel - start)
    if numel <= 0:
        return None
    group = base.param_groups[wrapper.sub_group_to_group_id[sub_group]]
    return Piece(parameter.ds_shape, start, flat.detach().narrow(0, offset, numel), group, flat, offset)


def _check_entry(name: str, entry: dict[str, Any]) -> None:
    """Raises ValueError, or KeyError, for what is not a piece of a parameter."""
    end = int(entry["start"]) + max((tensor.numel() for tensor in entry.values() if torch.is_tensor(tensor)), default=0)
    if int(entry["step"]) < 0 or int(entry["start"]) < 0 or end > torch.Size(entry["shape"]).numel():
        raise ValueError(f"{name}: its piece does not fit its shape {tuple(entry['shape'])}")


class SavedState:
    """The optimizer's files of a checkpoint, read by parameter."""

    def __init__(self, step: Path):
        """Raises CheckpointError if a file cannot be read safely."""
        self.where = step
        self._entries: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for path in sorted(step.glob(FILES)):
            content = load_tensors(path, mapped=True)
            try:
                for name, entry in content["parameters"].items():
                    _check_entry(name, entry)
                    self._entries.setdefault(name, {}).setdefault(int(content["tensor_rank"]), []).append(entry)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise CheckpointError(
                    f"{path}: is not an optimizer's file ({error}); the checkpoint is damaged"
                ) from error

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def step(self, name: str) -> int:
        return int(self._first(name)["step"])

    def has(self, name: str, kind: str) -> bool:
        return name in self._entries and kind in self._first(name)

    def whole(self, name: str, kind: str, expected: torch.Size) -> Tensor:
        """The unsliced tensor. Raises CheckpointError if pieces are missing or the sizes do not fit `expected`."""
        if name not in self._entries:
            raise CheckpointError(f"{self.where}: the optimizer's files lack {name}, which the configured model has")
        ranks = self._entries[name]
        slices = [self._join(name, kind, ranks[rank]) for rank in sorted(ranks)]
        return merge_shards(name, slices, expected, self.where)

    def _first(self, name: str) -> dict[str, Any]:
        return next(iter(self._entries[name].values()))[0]

    def _join(self, name: str, kind: str, entries: Iterable[dict[str, Any]]) -> Tensor:
        """One tensor-parallel slice from its pieces; stages that share a parameter wrote equal ones."""
        entries = sorted(entries, key=lambda entry: entry["start"])
        shape = torch.Size(entries[0]["shape"])
        if entries[0][kind].numel() == shape.numel():
            return entries[0][kind].view(shape)
        result, filled = torch.empty(shape.numel()), 0
        for entry in entries:
            if entry["start"] > filled:
                break
            end = entry["start"] + entry[kind].numel()
            result[entry["start"] : end] = entry[kind]
            filled = max(filled, end)
        if filled != shape.numel():
            raise CheckpointError(
                f"{self.where}: the optimizer's files hold {filled:,} of the {shape.numel():,} elements of {name}; "
                "a rank's file is missing"
            )
        return result.view(shape)


def slice_parameter(parameter: nn.Parameter, whole: Tensor, tensor_rank: int) -> Tensor:
    """This tensor-parallel rank's slice of an unsliced tensor of the parameter's."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    size = parameter.shape[parameter.partition_dim]
    return whole.narrow(parameter.partition_dim, tensor_rank * size, size)


def full_shape(parameter: nn.Parameter, tensor_size: int) -> torch.Size:
    """Shape before tensor-parallel slicing and ZeRO 3's partitioning."""
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tensor_size
    return torch.Size(shape)
