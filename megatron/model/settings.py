"""What a model is built from: the configuration's model section, this rank's place, and the padded
vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # GPU benchmarks run without pydantic
    import torch

    from megatron.config.schema.model import ModelConfig


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the tensor-parallel group. The process group itself is in
    megatron-core's parallel_state.
    """

    size: int = 1
    rank: int = 0

    def heads(self, num_heads: int) -> slice:
        """The slice of all `num_heads` attention heads that this rank computes."""
        local = num_heads // self.size
        return slice(self.rank * local, (self.rank + 1) * local)


ONE_RANK = TensorParallel()


@dataclass(frozen=True)
class Layout:
    """The parallel sizes, and this rank's pipeline stage, data-parallel rank and tensor-parallel
    rank.
    """

    rank: int
    world_size: int
    pipeline_size: int
    tensor_size: int
    data_size: int
    stage: int
    data_rank: int
    tensor_rank: int
    device: "torch.device"

    @property
    def tensor_parallel(self) -> TensorParallel:
        return TensorParallel(self.tensor_size, self.tensor_rank)

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes for all ranks."""
        return self.rank == 0

    def describe(self) -> str:
        return (
            f"{self.world_size} rank{'s' * (self.world_size > 1)} on {self.device.type}: "
            f"data parallel {self.data_size}, pipeline {self.pipeline_size}, tensor parallel "
            f"{self.tensor_size}"
        )


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a model on one rank. Sizes are those of the full model, not of a tensor-parallel
    slice.

    Attributes:
        padded_vocab_size: rows of the embedding; the key of this name in `config` may be unset.
    """

    config: "ModelConfig"
    padded_vocab_size: int
    tp: TensorParallel = ONE_RANK
