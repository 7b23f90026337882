"""Process groups, devices and random seeds."""

import os
import random
from dataclasses import dataclass

import numpy as np
import torch

from megatron.config import Config, UserError
from megatron.model.settings import TensorParallel


@dataclass(frozen=True)
class Layout:
    """This rank's place among pipeline stages, data-parallel replicas and tensor-parallel slices."""

    rank: int
    world_size: int
    pipeline_size: int
    tensor_size: int
    data_size: int
    stage: int
    data_rank: int
    tensor_rank: int
    device: torch.device

    @property
    def tensor_parallel(self) -> TensorParallel:
        return TensorParallel(self.tensor_size, self.tensor_rank)

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that prints and writes what belongs to the whole run."""
        return self.rank == 0

    def describe(self) -> str:
        return (
            f"{self.world_size} rank{'s' * (self.world_size > 1)} on {self.device.type}: "
            f"data parallel {self.data_size}, pipeline {self.pipeline_size}, tensor parallel {self.tensor_size}"
        )


def initialize(config: Config) -> Layout:
    """Join the process group of the launcher (or make one of this process alone), and lay the ranks out.

    Ranks are ordered tensor-parallel fastest, then data, then pipeline, in DeepSpeed and in megatron-core alike.
    Raises UserError when the number of ranks does not fit the parallel sizes.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from megatron.core import parallel_state

    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    # DeepSpeed would compile its shared-memory collectives here, at run time and with a compiler; gloo needs neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = config.parallel.distributed_backend or ("nccl" if on_gpu else "gloo")
    if backend == "nccl" and not on_gpu:
        backend = "gloo"
        if int(os.environ.get("RANK", "0")) == 0:
            print("distributed-backend: nccl needs a GPU and none is here; using gloo", flush=True)
    if not torch.distributed.is_initialized():
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        else:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
            # One process needs no address: the store is a table in memory.
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pipeline, tensor = max(1, config.parallel.pipe_parallel_size), config.parallel.model_parallel_size
    if world % (pipeline * tensor):
        raise UserError(
            f"{world} ranks cannot be divided into pipe-parallel-size {pipeline} x model-parallel-size {tensor}; "
            f"start a multiple of {pipeline * tensor} (num_gpus) or change these keys"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
        )
    data = world // (pipeline * tensor)
    return Layout(
        rank=rank,
        world_size=world,
        pipeline_size=pipeline,
        tensor_size=tensor,
        data_size=data,
        stage=rank // (data * tensor),
        data_rank=rank // tensor % data,
        tensor_rank=rank % tensor,
        device=torch.device(get_accelerator().device_name(local_rank) if on_gpu else "cpu"),
    )


def seed_everything(seed: int, layout: Layout) -> None:
    """Seed Python, NumPy and torch for what is random while training (dropout); tensor-parallel ranks agree, replicas
    differ.

    The initial weights do not depend on these: see `megatron/model/initialization.py`.
    """
    local = (seed * 1_000_003 + layout.stage * 65_537 + layout.data_rank) % 2**32
    random.seed(local)
    np.random.seed(local)  # noqa: NPY002 (the generator that libraries share)
    torch.manual_seed(local)


def shutdown() -> None:
    """Leave the process groups, so that nothing is left to time out at exit and another run can start here."""
    import deepspeed

    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        deepspeed.comm.destroy_process_group()
