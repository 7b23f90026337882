"""Optimizers that update whole parameters, for parameters that tensor parallelism and ZeRO split
over ranks.

Each split parameter has an owner, the rank that has most of it. For a step, the other ranks send
their fragments of the weights and gradients to the owner. It updates the whole parameter with the
library's optimizer and sends the fragments of the weights back. The state of a parameter is on its
owner, in one piece, and does not depend on the layout.

This is independent of how DeepSpeed partitions, clips and converts weights and gradients: DeepSpeed
calls `step` with fragments of float32 weights and their gradients, as for every other optimizer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

# Elements of split parameters that all ranks exchange at once. Each needs about 16 bytes on its
# owner meanwhile.
EXCHANGED_AT_ONCE = 2**27


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that this rank's optimizer owns.

    Attributes:
        shape: of the parameter's tensor-parallel slice.
        start: index of the fragment's first element in the flattened slice.
        master: the fragment of the float32 weights that the optimizer updates, flattened.
        group: the optimizer's parameter group.
        key: the tensor under which the optimizer stores the state.
        offset: index of the fragment's first element in the flattened `key`.
    """

    shape: torch.Size
    start: int
    master: Tensor
    group: dict[str, Any]
    key: Tensor
    offset: int

    def of(self, state: Tensor) -> Tensor:
        """The fragment's view of a state tensor of `key`, flattened. A tensor that does not have
        the parameter's shape (see `state_shape`) is returned whole; the optimizer does not work on
        fragments.
        """
        flat = state.detach().view(-1)
        if flat.numel() != self.key.numel():
            return flat
        return flat.narrow(0, self.offset, self.master.numel())

    def gradient(self) -> Tensor:
        """The fragment of the gradient of `key`, flattened."""
        assert self.key.grad is not None
        return self.key.grad.reshape(-1).narrow(0, self.offset, self.master.numel())


@dataclass(frozen=True)
class _Piece:
    """What other ranks know of a fragment."""

    name: str
    split_dim: int | None  # the dimension that tensor parallelism splits
    tensor_rank: int
    shape: tuple[int, ...]  # of the tensor-parallel slice
    start: int
    size: int
    tensor_number: int  # of the tensor that contains it


@dataclass
class _Parameter:
    """A whole parameter.

    Attributes:
        pieces: group rank -> its piece.
        owner: the group rank that updates the parameter.
        fragment: this rank's, if it has one.
        weight: on the owner, the parameter of the library's optimizer. If the parameter is split,
            it is a single number with the strides 0 (see `_placeholder`), except during a step.
    """

    pieces: dict[int, _Piece]
    owner: int
    fragment: Fragment | None
    weight: Tensor | None = None

    @property
    def first(self) -> _Piece:
        return next(iter(self.pieces.values()))

    @property
    def slices(self) -> int:
        """Number of tensor-parallel slices."""
        if self.first.split_dim is None:
            return 1
        return 1 + max(piece.tensor_rank for piece in self.pieces.values())

    @property
    def shape(self) -> torch.Size:
        shape = list(self.first.shape)
        if self.first.split_dim is not None:
            shape[self.first.split_dim] *= self.slices
        return torch.Size(shape)


class WholeParameterOptimizer(Optimizer):
    """Lets an optimizer of whole parameters update the fragments of parameters that DeepSpeed's
    optimizers have.

    It has the parameter groups of `inner`, which DeepSpeed modifies, and no state. `inner` has a
    parameter for each whole parameter that this rank owns, and their state. Its options are copied
    from the groups at each step.
    """

    def __init__(self, inner: Optimizer):
        super().__init__([dict(group) for group in inner.param_groups], {})
        self.inner = inner
        self._groups = list(zip(self.param_groups, inner.param_groups, strict=True))
        for group in inner.param_groups:
            group["params"] = []
        self._parameters: list[_Parameter] = []
        self._numbers: dict[int, int] = {}  # id of a tensor that DeepSpeed updates -> its number

    def attach(
        self,
        fragments: Mapping[str, Fragment],
        tensors: Sequence[Tensor],
        *,
        split_dims: Mapping[str, int],
        tensor_rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Assign an owner to each parameter. Until then, `step` does nothing. A collective of
        `group`.

        fragments: parameter name -> this rank's fragment.
        tensors: those that DeepSpeed updates, in the same order on all ranks; they contain the
            fragments.
        split_dims: parameter name -> the dimension that tensor parallelism splits. Other parameters
            have a copy on each tensor-parallel rank.
        group: the ranks that together have one copy of the weights; None if it is this rank alone.
        """
        # The ranks that together have the parameters, and what DeepSpeed calls the tensors here.
        self._group, self._rank, self._size = group, 0, 1
        if group is not None:
            self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._device = tensors[0].device
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}

        # Exchange the pieces of all ranks.
        local = []
        for name, own in fragments.items():
            place = (tuple(own.shape), own.start, own.master.numel())
            number = self._numbers[id(own.key)]
            local.append(_Piece(name, split_dims.get(name), tensor_rank, *place, number))
        gathered: list[list[_Piece]] = [local]
        if group is not None:
            gathered *= self._size
            dist.all_gather_object(gathered, local, group=group)

        # Without a split dimension, each tensor-parallel rank has a copy with its own owner.
        copies: dict[tuple[str, int | None], dict[int, _Piece]] = {}
        for rank, pieces in enumerate(gathered):
            for piece in pieces:
                copy = None
                if piece.split_dim is None:
                    copy = piece.tensor_rank
                copies.setdefault((piece.name, copy), {})[rank] = piece

        # The rank with the largest piece owns a parameter. Ties go to the rank that owns the least.
        inner_groups = {id(outer): inner for outer, inner in self._groups}
        owned = [0] * self._size  # elements
        for (name, _), by_rank in copies.items():
            largest = max(piece.size for piece in by_rank.values())
            candidates = [rank for rank, piece in by_rank.items() if piece.size == largest]
            owner = min(candidates, key=owned.__getitem__)
            fragment = None
            if self._rank in by_rank:
                fragment = fragments[name]
            parameter = _Parameter(by_rank, owner, fragment)
            owned[owner] += parameter.shape.numel()

            # A parameter that lies on its owner alone is updated in place.
            if owner == self._rank and fragment is not None:
                if len(by_rank) == 1:
                    parameter.weight = fragment.master.view(parameter.shape)
                else:
                    parameter.weight = _placeholder(fragment.master, parameter.shape)
                inner_groups[id(fragment.group)]["params"].append(parameter.weight)
            self._parameters.append(parameter)

    @property
    def num_exchanged(self) -> int:
        """Elements that the ranks of `group` exchange in each step."""
        split = [parameter for parameter in self._parameters if len(parameter.pieces) > 1]
        return sum(parameter.shape.numel() for parameter in split)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters in tensors with gradients. A collective of `group`."""
        for outer, inner in self._groups:
            inner.update({name: value for name, value in outer.items() if name != "params"})

        # The parameters in tensors with gradients: ZeRO calls this once for each group of them.
        numbers: set[int | None] = set()
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    numbers.add(self._numbers.get(id(tensor)))
        parameters = [each for each in self._parameters if each.first.tensor_number in numbers]

        # Those that lie on one rank are updated in place, the others in batches.
        whole: list[Tensor] = []
        for parameter in parameters:
            weight, fragment = parameter.weight, parameter.fragment
            if len(parameter.pieces) == 1 and weight is not None and fragment is not None:
                weight.grad = fragment.gradient().view(parameter.shape)
                whole.append(weight)
        self.inner.step()
        for weight in whole:
            weight.grad = None
        for batch in _batches(parameters):
            self._update_split(batch)

    def _update_split(self, batch: Sequence[_Parameter]) -> None:
        mine = [parameter.weight for parameter in batch if parameter.weight is not None]
        weights = self._to_owners(batch, lambda fragment: fragment.master)
        gradients = self._to_owners(batch, Fragment.gradient)
        for weight, value, gradient in zip(mine, weights, gradients, strict=True):
            weight.data, weight.grad = value, gradient
        self.inner.step()
        self._from_owners(batch)
        for weight in mine:
            weight.grad, weight.data = None, _placeholder(weight, weight.shape)

    def owned(self, *, with_weights: bool) -> dict[str, Fragment]:
        """Parameter name -> the whole, unsliced parameter, of those that this rank owns. The state
        is in `inner`.

        with_weights: gather the weights of split parameters, which is a collective of `group`.
        Otherwise only the size of their `master` is defined.
        """
        # Id of a split parameter -> its weights.
        gathered: dict[int, Tensor] = {}
        if with_weights:
            for batch in _batches(self._parameters):
                mine = [parameter for parameter in batch if parameter.weight is not None]
                weights = self._to_owners(batch, lambda fragment: fragment.master)
                gathered.update(zip(map(id, mine), weights, strict=True))

        # Each parameter as one fragment.
        inner_groups = {id(outer): inner for outer, inner in self._groups}
        fragments = {}
        for parameter in self._parameters:
            weight = parameter.weight
            if weight is not None and parameter.fragment is not None:
                group = inner_groups[id(parameter.fragment.group)]
                master = gathered.get(id(parameter), weight).view(-1)
                whole = Fragment(parameter.shape, 0, master, group, weight, 0)
                fragments[parameter.first.name] = whole
        return fragments

    def _to_owners(
        self, batch: Sequence[_Parameter], read: Callable[[Fragment], Tensor]
    ) -> list[Tensor]:
        """The whole tensors of the parameters of `batch` that this rank owns, from the fragments of
        all ranks.
        """
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        sizes: list[list[int]] = [[] for _ in range(self._size)]
        for parameter in batch:
            if parameter.fragment is not None:
                sent[parameter.owner].append(read(parameter.fragment))
            if parameter.owner == self._rank:
                for rank, piece in parameter.pieces.items():
                    sizes[rank].append(piece.size)
        received = self._exchange(sent, sizes)
        tensors = []
        for parameter in batch:
            if parameter.owner == self._rank:
                slices = torch.empty(parameter.slices, *parameter.first.shape, device=self._device)
                for rank, view in _views(parameter, slices):
                    view.copy_(next(received[rank]))
                if parameter.slices == 1:
                    tensors.append(slices[0])
                else:
                    tensors.append(torch.cat(slices.unbind(), parameter.first.split_dim or 0))
        return tensors

    def _from_owners(self, batch: Sequence[_Parameter]) -> None:
        """Copy the weights of the owners to the fragments of all ranks."""
        sent: list[list[Tensor]] = [[] for _ in range(self._size)]
        sizes: list[list[int]] = [[] for _ in range(self._size)]
        for parameter in batch:
            if parameter.fragment is not None:
                sizes[parameter.owner].append(parameter.fragment.master.numel())
            if parameter.weight is not None:
                dim = parameter.first.split_dim or 0
                slices = torch.stack(parameter.weight.chunk(parameter.slices, dim))
                for rank, view in _views(parameter, slices):
                    sent[rank].append(view)
        received = self._exchange(sent, sizes)
        for parameter in batch:
            if parameter.fragment is not None:
                parameter.fragment.master.copy_(next(received[parameter.owner]))

    def _exchange(self, sent: list[list[Tensor]], sizes: list[list[int]]) -> list[Iterator[Tensor]]:
        """Send flat tensors to each rank, and receive tensors of the given sizes from each rank."""
        parts, sent_totals = [torch.empty(0, device=self._device)], []
        for tensors in sent:
            parts += tensors
            sent_totals.append(sum(tensor.numel() for tensor in tensors))
        totals = [sum(row) for row in sizes]
        incoming = torch.empty(sum(totals), device=self._device)
        outgoing = torch.cat(parts)
        dist.all_to_all_single(incoming, outgoing, totals, sent_totals, group=self._group)
        by_rank = zip(incoming.split(totals), sizes, strict=True)
        return [iter(part.split(row)) for part, row in by_rank]


def _placeholder(like: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of `shape`, with the device and dtype of `like`, in the memory of one element."""
    return like.new_empty(()).expand(shape)


def _views(parameter: _Parameter, slices: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Group rank and flat view of its piece in `slices`, [tensor-parallel rank, *shape]."""
    flat = slices.view(len(slices), -1)
    for rank, piece in parameter.pieces.items():
        row = 0
        if piece.split_dim is not None:
            row = piece.tensor_rank
        yield rank, flat[row].narrow(0, piece.start, piece.size)


def _batches(parameters: Sequence[_Parameter]) -> Iterator[list[_Parameter]]:
    """The split ones of `parameters`, in batches of at most EXCHANGED_AT_ONCE elements or one
    parameter.
    """
    batch: list[_Parameter] = []
    elements = 0
    for parameter in parameters:
        if len(parameter.pieces) == 1:
            continue
        size = parameter.shape.numel()
        if batch and elements + size > EXCHANGED_AT_ONCE:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += size
    if batch:
        yield batch
