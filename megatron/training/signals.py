"""SIGTERM and SIGINT: finish the step, save, leave."""

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """Remembers that a signal came; `agreed()` is the same on every rank, so that all of them stop after the same
    step.
    """

    def __init__(self):
        self.signal: int | None = None
        # The hosts agree among themselves: NCCL would make each wait for its GPU after every step.
        several = dist.get_world_size() > 1
        self._hosts = dist.new_group(backend="gloo") if several and dist.get_backend() == "nccl" else None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _frame: object) -> None:
        if self.signal is not None:
            # Asked twice: do not wait for the step.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number

    def agreed(self) -> bool:
        """True on all ranks if any rank was asked to stop. A collective: every rank calls it after the same step."""
        if dist.get_world_size() == 1:
            return self.signal is not None
        flag = torch.tensor([self.signal is not None], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._hosts)
        return bool(flag.item())
