"""How the work is spread over processes, and how many samples make a step."""

from typing import Literal

from megatron.config.schema.base import Group, Int, key
from megatron.utils.errors import UserError


class ParallelConfig(Group):
    """Parallelism"""

    pipe_parallel_size: Int = key(
        0,
        """Pipeline stages. 0: the model is one sequence of layers (needed for ZeRO 2 and 3), and so it is with 1;
        2 or more: DeepSpeed's PipelineModule.""",
        ge=0,
    )
    model_parallel_size: Int = key(1, "Processes that share each layer's matrices (tensor parallelism).", ge=1)
    distributed_backend: Literal["nccl", "gloo", "mpi", "ccl"] | None = key(
        None, "Backend of torch.distributed. Default: nccl on CUDA, gloo on CPU."
    )
    fp32_allreduce: bool = key(False, "True: gradients are averaged over data-parallel processes in float32.")
    pipe_partition_method: str = key(
        "type:transformer|mlp",
        """How layers are dealt to pipeline stages: parameters (equal parameter counts), uniform (equal layer counts),
        or type:REGEX (equal counts of layers whose class name matches).""",
    )

    @property
    def model_parallel_world(self) -> int:
        """Processes that hold one copy of the model together."""
        return max(1, self.pipe_parallel_size) * self.model_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model among world_size processes.

        Raises UserError if the processes cannot be divided into whole copies.
        """
        copies, rest = divmod(world_size, self.model_parallel_world)
        if copies == 0 or rest:
            raise UserError(
                f"{world_size} process(es) cannot hold whole copies of a model that takes {self.model_parallel_world}: "
                f"pipe_parallel_size {self.pipe_parallel_size} times model_parallel_size {self.model_parallel_size}; "
                f"use a multiple of {self.model_parallel_world} processes (num_gpus)"
            )
        return copies


class BatchConfig(Group):
    """Batch"""

    train_batch_size: Int | None = key(
        None, "Sequences per optimizer step, over all processes. Default: computed from the two keys below.", ge=1
    )
    train_micro_batch_size_per_gpu: Int | None = key(
        None, "Sequences per forward pass and process. Default: computed from train_batch_size.", ge=1
    )
    gradient_accumulation_steps: Int | None = key(
        None, "Forward passes per optimizer step. Default: computed from the other two, or 1.", ge=1
    )

    @property
    def given(self) -> bool:
        """True if a batch size was given at all; evaluation and generation need none."""
        return self.train_batch_size is not None or self.train_micro_batch_size_per_gpu is not None

    def resolve(self, data_parallel_size: int) -> tuple[int, int, int]:
        """Complete the three sizes for this many data-parallel processes.

        Returns (micro-batch, accumulation steps, global batch), with global = micro-batch * accumulation * processes.
        Raises UserError, with the arithmetic, if the given sizes do not fit each other.
        """
        total, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if not self.given:
            raise UserError("no batch size: give train_micro_batch_size_per_gpu or train_batch_size")
        if total is None:
            steps = steps or 1
            return micro, steps, micro * steps * data_parallel_size
        if micro is None:
            steps = steps or 1
            micro = _divide(total, "gradient_accumulation_steps", steps, data_parallel_size)
        elif steps is None:
            steps = _divide(total, "train_micro_batch_size_per_gpu", micro, data_parallel_size)
        product = micro * steps * data_parallel_size
        if product != total:
            raise UserError(
                f"train_batch_size is {total}, but train_micro_batch_size_per_gpu {micro} * "
                f"gradient_accumulation_steps {steps} * {data_parallel_size} data-parallel process(es) = {product}; "
                "give two of the three, or make them fit"
            )
        return micro, steps, total


def _divide(total: int, name: str, value: int, data_parallel_size: int) -> int:
    """total / (value * data_parallel_size), which must be a whole number."""
    divisor = value * data_parallel_size
    if total % divisor:
        raise UserError(
            f"train_batch_size {total} is not a multiple of {name} {value} * {data_parallel_size} data-parallel "
            f"process(es) = {divisor}"
        )
    return total // divisor
