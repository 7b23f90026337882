"""Batches in an order that depends on nothing but the dataset: not on ranks, batch shape, workers, or a restart."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.data.datasets import Samples
from megatron.utils.errors import UserError


def rank_samples(
    batch: int, *, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int, consumed_samples: int
) -> range:
    """Positions, in the dataset's order, of the samples that a rank takes as its micro-batch number `batch`.

    With micro-batch m on D ranks, rank r takes consumed + batch*m*D + r*m and the m-1 that follow. So m*D*A consecutive
    samples make up a step of A accumulated micro-batches, whichever m, D and A make the same global batch.
    """
    first = consumed_samples + (batch * data_parallel_size + data_parallel_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


class Loader:
    """Endless batches from `dataset`; past its end it starts over. Made by `build_loader`."""

    def __init__(
        self,
        dataset: Samples,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int,
        num_workers: int,
        pin_memory: bool,
    ):
        self._dataset = dataset
        self._arguments = {
            "micro_batch_size": micro_batch_size,
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
            "consumed_samples": consumed_samples,
        }
        # A DataLoader without a generator of its own takes a number from torch's global one, and dropout would then
        # depend on how often batches were asked for.
        self._loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=_BatchSampler(len(dataset), self._arguments),
            num_workers=num_workers,
            collate_fn=_Collate(dataset.settings.eod_mask_loss),
            generator=torch.Generator(),
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        vocab_size = self._dataset.settings.vocab_size
        for number, batch in enumerate(self._loader):
            largest = max(int(batch["tokens"].max()), int(batch["labels"][:, -1].max()))
            if largest >= vocab_size:
                self._refuse(number, batch, vocab_size)
            yield batch

    def _refuse(self, number: int, batch: dict[str, torch.Tensor], vocab_size: int) -> None:
        for row, position in enumerate(rank_samples(number, **self._arguments)):
            largest = max(int(batch["tokens"][row].max()), int(batch["labels"][row].max()))
            if largest >= vocab_size:
                source = self._dataset.source(position % len(self._dataset))
                raise UserError(
                    f"{source}: token id {largest} in sample {position}, but the vocabulary ends at {vocab_size - 1}: "
                    "the data was made with another tokenizer"
                )


def build_loader(
    dataset: Samples,
    *,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """This rank's micro-batches, from `consumed_samples` on (see `rank_samples` for which samples those are).

    Args:
        dataset: one of `build_datasets`' datasets.
        consumed_samples: samples that all ranks together have taken before.
        num_workers: processes that read ahead; 0: read when asked. Without influence on what comes out.
        pin_memory: batches in page-locked memory, from where a GPU takes them while the host goes on.

    Returns:
        an endless iterable of {"tokens": int64 [b, s], "labels": int64 [b, s]}, and with eod_mask_loss "loss_mask":
        float32 [b, s]. Without it every label counts and there is no mask.

    Raises:
        UserError: while iterating: a token id beyond the vocabulary.
    """
    if micro_batch_size < 1 or not 0 <= data_parallel_rank < data_parallel_size or consumed_samples < 0:
        raise ValueError(
            f"micro-batch {micro_batch_size}, rank {data_parallel_rank} of {data_parallel_size}, {consumed_samples} "
            "samples consumed: not a possible position"
        )
    return Loader(
        dataset, micro_batch_size, data_parallel_rank, data_parallel_size, consumed_samples, num_workers, pin_memory
    )


class _BatchSampler:
    """Endless lists of dataset indices."""

    def __init__(self, length: int, arguments: dict[str, int]):
        self._length = length
        self._arguments = arguments

    def __iter__(self) -> Iterator[list[int]]:
        batch = 0
        while True:
            yield [position % self._length for position in rank_samples(batch, **self._arguments)]
            batch += 1


@dataclass(frozen=True)
class _Collate:
    """Samples to a batch; a class, so that workers can receive it whichever way they are started."""

    with_loss_mask: bool

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        keys = ["tokens", "labels"] + ["loss_mask"] * self.with_loss_mask
        return {key: torch.stack([sample[key] for sample in samples]) for key in keys}
