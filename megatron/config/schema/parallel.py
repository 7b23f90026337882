"""Keys of parallelism, batch sizes and the launcher."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator

from megatron.config.schema.base import CaseInsensitive, ConfigSection, Int, PathText, field
from megatron.utils.errors import UserError

# Keys of DeepSpeed that only measure and log, or tune reading and writing.
DEEPSPEED_KEYS = (
    "aio",
    "comms_logger",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "log_level",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
)


def _partition_method(value: str) -> str:
    if not re.fullmatch(r"parameters|uniform|type:.+", value, re.IGNORECASE):
        raise ValueError("must be parameters, uniform or type:REGEX")
    return value


class ParallelConfig(ConfigSection):
    """Parallelism"""

    # How the ranks share the model.
    pipe_parallel_size: Int = field(
        0,
        """Pipeline stages. 0 or 1: no pipeline (ZeRO 2 and 3 require 0); 2 or more: DeepSpeed's
        PipelineModule.""",
        ge=0,
    )
    model_parallel_size: Int = field(
        1, "Tensor parallelism: number of ranks over which each layer is split.", ge=1
    )

    # How they communicate.
    distributed_backend: Literal["nccl", "gloo"] | None = field(
        None, "Backend of torch.distributed. Default: nccl on GPUs, gloo on CPUs."
    )
    fp32_allreduce: bool = field(
        False, "True: average gradients over the data-parallel ranks in float32."
    )

    # Details of DeepSpeed.
    pipe_partition_method: Annotated[str, AfterValidator(_partition_method)] = field(
        "type:transformer|mlp",
        """How layers are distributed over pipeline stages: parameters (equal parameter counts),
        uniform (equal layer counts), or type:REGEX (equal counts of the layers whose class name
        matches).""",
    )
    deepspeed_extra_args: dict[str, Any] = field(
        {},
        f"""Further keys of DeepSpeed, passed on unchanged
            (https://www.deepspeed.ai/docs/config-json/):
        {", ".join(DEEPSPEED_KEYS)}. Other keys of this project decide the rest.""",
        path="deepspeed_extra_args.*",
    )

    def contradictions(self) -> Iterator[str]:
        for name in sorted(self.deepspeed_extra_args.keys() - set(DEEPSPEED_KEYS)):
            yield (
                f"deepspeed_extra_args.{name} is not passed on: it would contradict other keys of "
                "this project, or DeepSpeed does not read it; remove it (passed on: "
                f"{', '.join(DEEPSPEED_KEYS)})"
            )

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one replica of the model."""
        return max(1, self.pipe_parallel_size) * self.model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas on `world_size` ranks. Raises UserError if the ranks cannot be
        divided.
        """
        replicas, remainder = divmod(world_size, self.ranks_per_replica)
        if replicas == 0 or remainder:
            raise UserError(
                f"{world_size} process(es) cannot be divided into replicas of "
                f"{self.ranks_per_replica}: pipe_parallel_size {self.pipe_parallel_size} times "
                f"model_parallel_size {self.model_parallel_size}; use a multiple of "
                f"{self.ranks_per_replica} processes (num_gpus)"
            )
        return replicas


class BatchSizes(NamedTuple):
    """global_batch = micro_batch * accumulation * data-parallel size, in sequences."""

    micro_batch: int
    accumulation: int
    global_batch: int

    def __str__(self) -> str:
        replicas = self.global_batch // (self.micro_batch * self.accumulation)
        return (
            f"batch: {self.global_batch:,} sequence{'s' * (self.global_batch > 1)} = {replicas:,} "
            f"data-parallel rank{'s' * (replicas > 1)} x {self.micro_batch:,} x "
            f"{self.accumulation:,} accumulation step{'s' * (self.accumulation > 1)}"
        )


class BatchConfig(ConfigSection):
    """Batch"""

    train_batch_size: Int | None = field(
        None,
        "Sequences per optimizer step, over all ranks. Default: computed from the next two keys.",
        ge=1,
    )
    train_micro_batch_size_per_gpu: Int | None = field(
        None, "Sequences per forward pass and rank. Default: computed from train_batch_size.", ge=1
    )
    gradient_accumulation_steps: Int | None = field(
        None,
        "Forward passes per optimizer step. Default: computed from the other two keys, or 1.",
        ge=1,
    )

    def resolve(self, data_parallel_size: int) -> BatchSizes:
        """All three sizes for this number of replicas. Raises UserError if the given sizes
        contradict each other.
        """
        global_batch, micro_batch = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps

        def divide(total: int, key: str, value: int) -> int:
            divisor = value * data_parallel_size
            if total % divisor:
                raise UserError(
                    f"train_batch_size {total} is not a multiple of {key} {value} * "
                    f"{data_parallel_size} data-parallel rank(s) = {divisor}; change these keys or "
                    "the number of ranks"
                )
            return total // divisor

        # Without train_batch_size, it follows from the other two.
        if global_batch is None:
            if micro_batch is None:
                raise UserError(
                    "no batch size: set train_micro_batch_size_per_gpu or train_batch_size"
                )
            accumulation = accumulation or 1
            global_batch = micro_batch * accumulation * data_parallel_size
            return BatchSizes(micro_batch, accumulation, global_batch)

        # Otherwise one of them may be missing.
        if micro_batch is None:
            accumulation = accumulation or 1
            micro_batch = divide(global_batch, "gradient_accumulation_steps", accumulation)
        elif accumulation is None:
            accumulation = divide(global_batch, "train_micro_batch_size_per_gpu", micro_batch)

        # All three are known, and must fit.
        product = micro_batch * accumulation * data_parallel_size
        if product != global_batch:
            raise UserError(
                f"train_batch_size is {global_batch}, but train_micro_batch_size_per_gpu "
                f"{micro_batch} * gradient_accumulation_steps {accumulation} * "
                f"{data_parallel_size} data-parallel rank(s) = {product}; set only two of the "
                "three, or change them to match"
            )
        return BatchSizes(micro_batch, accumulation, global_batch)


class LauncherConfig(ConfigSection):
    """Launcher"""

    # Which hosts and slots.
    hostfile: PathText | None = field(
        None,
        """File with one `HOST slots=N` line per node. Default: the file named by the environment
        variable DLTS_HOSTFILE, or /job/hostfile if it exists; otherwise only this machine is
        used.""",
    )
    include: str | None = field(
        None,
        """Hosts and slots to use: HOST[:SLOT,SLOT...] joined by @. Selecting slots on several hosts
        requires launcher pdsh. Cannot be combined with num_gpus or num_nodes.""",
    )
    exclude: str | None = field(
        None,
        "Hosts and slots not to use, in the same form. Cannot be combined with num_gpus or "
        "num_nodes.",
    )
    num_nodes: Int = field(
        -1, "Number of nodes to use, in the order of the hostfile. -1: all.", ge=-1
    )
    num_gpus: Int | None = field(
        None,
        "Processes per node, one per GPU. Default: one per available GPU; without a GPU, 1.",
        ge=1,
        le=1024,
    )

    # Where rank 0 is.
    master_addr: str | None = field(
        None,
        """Address of the first host. Default: with Slurm, its first node; else the first address
        that `hostname -I` prints on the first host (with no_ssh_check, the host's name).""",
    )
    master_port: Int | None = field(
        None,
        """Port of the first node for torch.distributed. Default: a free port; on several nodes
        29500; with Slurm a port that depends on the job.""",
        ge=1,
        le=65535,
    )

    # How ranks on other hosts are started.
    launcher: Annotated[Literal["pdsh", "openmpi", "slurm"], CaseInsensitive] = field(
        "pdsh",
        "Program that starts the ranks on several hosts: pdsh over ssh, mpirun, or srun "
        "(docs/clusters.md).",
    )
    deepspeed_slurm: bool = field(
        False,
        "True: every task of srun is a rank; without srun, this is an error. Implied by "
        "`launcher: slurm`, with which deepy.py starts srun.",
    )
    deepspeed_mpi: bool = field(
        False,
        "True: every process of mpirun is a rank; without mpirun, this is an error. Implied by "
        "`launcher: openmpi`, with which deepy.py starts mpirun.",
    )
    force_multi: bool = field(False, "True: use the multi-node launcher even for one node.")
    no_ssh_check: bool = field(
        False, "True: do not check that all hosts can be reached by ssh and have the same paths."
    )
    comment: str | None = field(None, "Slurm: --comment of the job step.")
    account: str | None = field(None, "Slurm: --account of the job step.")

    def contradictions(self) -> Iterator[str]:
        if self.include is not None and self.exclude is not None:
            yield "include and exclude are both set; remove one of them"
        if self.num_nodes == 0:
            yield "num_nodes must be at least 1, or -1 for all nodes"
        for name in ("include", "exclude"):
            if getattr(self, name) is not None and (
                self.num_gpus is not None or self.num_nodes > 0
            ):
                yield f"{name} selects the GPUs; remove num_gpus and num_nodes"
