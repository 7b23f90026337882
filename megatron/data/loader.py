"""Batches in an order that depends only on the dataset: not on ranks, batch shape, worker
processes, or restarts.
"""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import torch

from megatron.data.datasets import Samples, SampleSettings
from megatron.utils.errors import UserError, first_line
from megatron.utils.processes import exit_with_parent

_USER_ERROR_PREFIX = f"{UserError.__module__}.{UserError.__qualname__}: "


def rank_samples(
    batch: int,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    consumed_samples: int,
) -> range:
    """Return the positions, in the dataset's order, of the samples in micro-batch number `batch` of
    a rank.

    With micro-batch size m on D ranks, rank r takes m samples, starting at consumed + batch*m*D +
    r*m. So one step of A accumulated micro-batches consumes m*D*A consecutive samples, for any m, D
    and A with the same global batch size.
    """
    first = consumed_samples + (batch * data_parallel_size + data_parallel_rank) * micro_batch_size
    return range(first, first + micro_batch_size)


class Loader:
    """Endless micro-batches of a rank, starting after `consumed_samples` (see `rank_samples`).

    Yields {"tokens": int64 [b, s], "labels": int64 [b, s]}, with eod_mask_loss also "loss_mask":
    float32 [b, s], and with reset_attention_mask "document_ids": int64 [b, s]. Without a loss_mask,
    all labels count. Starts over at the end of the dataset. Raises UserError while iterating if a
    token id is beyond the vocabulary.

    If a worker process is killed, for example by the kernel because memory is full, this process
    reads the following batches, so that a run can save its state before it stops.

    Args:
        dataset: from `build_datasets`.
        consumed_samples: number of samples that all ranks together have consumed so far.
        num_workers: number of prefetching processes; 0 loads on demand. Does not affect the
            batches.
        pin_memory: allocate batches in page-locked memory, so that copies to a GPU run in the
            background.

    Attributes:
        failure: why worker processes are no longer used; None as long as they are.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_batch_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ):
        # What places a batch among those of all ranks.
        self._dataset = dataset
        self._placement = {
            "micro_batch_size": micro_batch_size,
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
            "consumed_samples": consumed_samples,
        }
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self.failure: str | None = None

    def _loader(self, first_batch: int, num_workers: int) -> Iterator[dict[str, torch.Tensor]]:
        # Without its own generator, a DataLoader would draw a seed from torch's global generator,
        # and dropout would depend on how often batches were requested.
        loader = torch.utils.data.DataLoader(
            self._dataset,
            batch_sampler=self._indices(first_batch),
            num_workers=num_workers,
            collate_fn=partial(_stack, self._dataset.settings),
            generator=torch.Generator(),
            pin_memory=self._pin_memory,
            worker_init_fn=_start_worker,
        )
        with _same_sigchld_handler():
            return iter(loader)

    def _indices(self, first_batch: int) -> Iterator[list[int]]:
        """Endless lists of dataset indices, from micro-batch `first_batch` on."""
        # After its last sample, a dataset begins again.
        length = len(self._dataset)
        for batch in itertools.count(first_batch):
            yield [position % length for position in rank_samples(batch, **self._placement)]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        vocab_size = self._dataset.settings.vocab_size
        for number, batch in enumerate(self._batches()):
            # Labels are the inputs shifted by one, so only their last column is new.
            ids = torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1)

            # A larger id would fail in the embedding, on a GPU without saying where.
            beyond = ids >= vocab_size
            if beyond.any():
                position = rank_samples(number, **self._placement)[int(beyond.any(1).nonzero()[0])]
                raise UserError(
                    f"{self._dataset.source(position % len(self._dataset))}: token id "
                    f"{ids[beyond][0]} in sample {position}, but the largest id of the vocabulary "
                    f"is {vocab_size - 1}: the data were built with another tokenizer"
                )
            yield batch

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        count = 0
        try:
            for batch in self._loader(0, self._num_workers):
                yield batch
                count += 1
        except UserError as error:
            # A DataLoader puts the whole traceback of a worker process into the message.
            message = str(error).strip().splitlines()[-1]
            raise UserError(message.removeprefix(_USER_ERROR_PREFIX)) from error
        except (RuntimeError, OSError, EOFError) as error:
            # A killed worker also breaks the connection through which it passes tensors. If the
            # data are the cause, the loader below raises the error again.
            if self._num_workers == 0:
                raise
            self.failure = f"a data worker was killed ({first_line(error)})"
        yield from self._loader(count, 0)


@contextlib.contextmanager
def _same_sigchld_handler() -> Iterator[None]:
    """Keep the handler of SIGCHLD. That of a DataLoader raises an exception when a worker process
    dies, wherever this process is, for example in the middle of an optimizer step. Without it, the
    next batch raises the exception.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)


def _start_worker(_: int) -> None:
    """Let this worker process end with its parent, and not receive the signals to the parent's
    process group: after SIGTERM, the parent needs its workers to finish the iteration before it
    saves a checkpoint.
    """
    exit_with_parent()
    os.setpgid(0, 0)


def _stack(
    settings: SampleSettings, samples: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """A batch of these samples."""
    keys = ["tokens", "labels"]
    if settings.eod_mask_loss:
        keys.append("loss_mask")
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in keys}
    if settings.reset_attention_mask:
        ends = (batch["tokens"] == settings.eod).long()
        batch["document_ids"] = ends.cumsum(1) - ends  # a document ends with the token `eod`
    return batch
