"""megatron-core's tensor-parallel layers, with the forward of torch's: one tensor in, one tensor out.

Imported only by `parallel.py`, and only when model-parallel-size > 1, so that a model on one rank needs no process
group.
"""

import torch
from torch import Tensor

from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


def _core_config() -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        # `initialization.py` fills the weights; they are made on the CPU and moved with the rest of the model.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.get_default_dtype(),
    )


def _no_initialization(tensor: Tensor) -> None:
    """megatron-core asks for an initializer even when it is not to be used."""


class ColumnLinear(ColumnParallelLinear):
    def __init__(self, input_size: int, output_size: int, bias: bool):
        super().__init__(
            input_size,
            output_size,
            config=_core_config(),
            init_method=_no_initialization,
            bias=bias,
            gather_output=False,
        )
        _mark_partition(self.weight, 0)
        if self.bias is not None:
            _mark_partition(self.bias, 0)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[0]


class RowLinear(RowParallelLinear):
    def __init__(self, input_size: int, output_size: int, bias: bool):
        super().__init__(
            input_size,
            output_size,
            config=_core_config(),
            init_method=_no_initialization,
            bias=bias,
            input_is_parallel=True,
            skip_bias_add=False,
        )
        _mark_partition(self.weight, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[0]


class Embedding(VocabParallelEmbedding):
    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__(vocab_size, hidden_size, init_method=_no_initialization, config=_core_config())
        _mark_partition(self.weight, 0)


def _mark_partition(parameter: torch.nn.Parameter, dim: int) -> None:
    # megatron-core sets these only when it initializes the weight itself; DeepSpeed's gradient norm and our
    # checkpoints read them.
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1
