"""The processes that share an evaluation: each computes a part of the segments, rank 0 writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process's number, and how many there are. One process needs no process group."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """True on the one that prints and writes."""
        return self.rank == 0

    def add(self, *tensors: Tensor) -> None:
        """Replace CPU tensors by their sums over the ranks."""
        if self.size > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def first(self, value: T | None) -> T | None:
        """The value of the first rank that has one."""
        if self.size == 1:
            return value
        values: list[T | None] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return next((one for one in values if one is not None), None)


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that a launcher started (by RANK and WORLD_SIZE), joined over gloo: what they exchange are a few sums,
    which stay on the CPU.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield Ranks(torch.distributed.get_rank(), size)
    finally:
        torch.distributed.destroy_process_group()
