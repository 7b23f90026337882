"""What a model is built from: the configuration's model section, and the values that a run computes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # GPU benchmarks run without pydantic
    from megatron.config.schema.model import ModelConfig


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the tensor-parallel group. The process group itself is in megatron-core's parallel_state."""

    size: int = 1
    rank: int = 0

    def heads(self, num_heads: int) -> slice:
        """The slice of all `num_heads` attention heads that this rank computes."""
        local = num_heads // self.size
        return slice(self.rank * local, (self.rank + 1) * local)


ONE_RANK = TensorParallel()


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a model on one rank. Sizes are those of the full model, not of a tensor-parallel slice.

    Attributes:
        padded_vocab_size: rows of the embedding; the key of this name in `config` may be unset.
    """

    config: "ModelConfig"
    padded_vocab_size: int
    tp: TensorParallel = ONE_RANK
