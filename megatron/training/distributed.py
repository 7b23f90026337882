"""Process groups, the layout of ranks, random seeds, and signals that all ranks act on together."""

import os
import random
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.config import Config, UserError
from megatron.model.settings import Layout
from megatron.utils.environment import use_gpus
from megatron.utils.errors import first_line
from megatron.utils.progress import fitted


def initialize(config: Config) -> Layout:
    """Join the process group of the launcher, or create one for this process alone; return the
    layout of the ranks.

    The tensor-parallel rank varies fastest, then the data-parallel rank, then the pipeline stage,
    as in DeepSpeed and megatron-core. Raises UserError if the number of ranks does not fit the
    parallel sizes, or if torch cannot use the machine's GPU.
    """
    # These imports take seconds, and most commands do not need them.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from megatron.core import parallel_state
    from megatron.training.deepspeed_setup import disable_shared_memory_collectives

    # Select the device of this rank before any library allocates on it.
    on_gpu = use_gpus()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise UserError(
                f"{socket.gethostname()} was given local rank {local_rank}, but has {gpus} visible "
                "GPU(s); lower its slots in the hostfile, or num_gpus (with Slurm, use "
                "--gpus-per-node and not --gpus-per-task)"
            )
        torch.cuda.set_device(local_rank)

    # The backend: a configuration for GPUs also runs on a CPU.
    disable_shared_memory_collectives()
    backend, device_name = config.parallel.distributed_backend or "nccl", "cpu"
    if on_gpu:
        device_name = get_accelerator().device_name(local_rank)
    elif backend == "nccl":
        backend = "gloo"
        if config.parallel.distributed_backend and int(os.environ.get("RANK", "0")) == 0:
            line = (
                "distributed-backend: nccl requires a GPU, but this run is on the CPU; using gloo"
            )
            print(fitted(line), flush=True)

    # Without a launcher, this process is a group of its own.
    if not dist.is_initialized():
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        required = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in required if name not in os.environ]
        if missing and world_size > 1:
            raise UserError(
                f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set; set all "
                "variables of torch.distributed (docs/clusters.md), or unset WORLD_SIZE"
            )
        if missing:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            # A single process keeps the store in memory and needs no address.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        elif world_size > 1:
            _check_address(os.environ["MASTER_ADDR"])
        try:
            deepspeed.init_distributed(
                dist_backend=backend, auto_mpi_discovery=False, verbose=False
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"{socket.gethostname()} cannot reach rank 0 at {address} ({first_line(error)}); "
                "set master_addr to an address of the first host that all hosts can reach, and "
                "master_port to a free port"
            ) from error

    # Divide the ranks among pipeline stages, replicas and tensor parallelism.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data_size = config.parallel.data_parallel_size(world_size)
    pipeline_size = max(1, config.parallel.pipe_parallel_size)
    tensor_size = config.parallel.model_parallel_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_size, pipeline_model_parallel_size=pipeline_size
        )

    # A rank's place follows from the order of the dimensions.
    return Layout(
        rank=rank,
        world_size=world_size,
        pipeline_size=pipeline_size,
        tensor_size=tensor_size,
        data_size=data_size,
        stage=rank // (data_size * tensor_size),
        data_rank=rank // tensor_size % data_size,
        tensor_rank=rank % tensor_size,
        device=torch.device(device_name),
    )


def _check_address(name: str) -> None:
    """Raises UserError if the address of rank 0 is a name that this host does not know; torch would
    retry for half an hour.
    """
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot find the first host, {name!r} ({error.strerror}); set "
            "master_addr to its address or to a name that all hosts know"
        ) from error


def seed_everything(seed: int, layout: Layout) -> None:
    """Seed Python, NumPy and torch, for dropout. Tensor-parallel ranks share a seed; replicas and
    stages differ.

    The initial weights do not depend on these generators: see `megatron/model/initialization.py`.
    """
    local_seed = (seed * 1_000_003 + layout.stage * 65_537 + layout.data_rank) % 2**32
    random.seed(local_seed)
    np.random.seed(local_seed)  # noqa: NPY002 (libraries use the global generator)
    torch.manual_seed(local_seed)


def shutdown() -> None:
    """Destroy the process groups. Otherwise they could time out at exit, and this process could not
    train again.
    """
    import deepspeed

    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


class DistributedSignalHandler:
    """Records SIGTERM, SIGINT, SIGUSR1 and SIGHUP, so that all ranks stop after the same iteration.
    A context manager.

    A second signal ends the process immediately, except SIGHUP: a terminal that is closed can send
    it twice. A rank of deepy.py ignores a second SIGTERM, too: the first one may have been sent to
    deepy.py as well, which forwards it. To end its ranks, deepy.py uses SIGKILL. A SIGHUP that is
    ignored, as under nohup, remains ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._stopped_by_other_rank = False
        # LAUNCHER_PID: set by megatron/launcher/node.py.
        self._repeatable = [signal.SIGHUP]
        if "LAUNCHER_PID" in os.environ:
            self._repeatable.append(signal.SIGTERM)
        # A CPU process group: with NCCL, every rank would wait for its GPU after each iteration.
        self._group = None
        if dist.get_world_size() > 1 and dist.get_backend() == "nccl":
            self._group = dist.new_group(backend="gloo")
        self._previous: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "DistributedSignalHandler":
        # The signals that are not used otherwise. SIGHUP is ignored under nohup.
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        # SIGUSR1 may be the launcher's signal, see `follow_launcher`.
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            numbers.append(signal.SIGUSR1)
        for number in numbers:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._stopped_by_other_rank:
            # A signal to all ranks reaches those on other hosts later, perhaps only now.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _handle(self, number: int, _frame: object) -> None:
        # deepy.py sends SIGTERM when its terminal is closed; this rank may have noticed it before
        # and received SIGHUP.
        if self.received not in (None, signal.SIGHUP) and number not in self._repeatable:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.received in (None, signal.SIGHUP):
            self.received = number

    def received_by_any_rank(self, *, stop: bool = False) -> bool:
        """True on all ranks if any rank has received a signal, or calls this with `stop`. A
        collective: call it on every rank.
        """
        stops = stop or self.received is not None
        if dist.get_world_size() == 1:
            return stops
        # The largest of all ranks' flags.
        flag = torch.tensor([stops], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        self._stopped_by_other_rank = bool(flag.item()) and not stops
        return bool(flag.item())
