"""Linear and embedding layers for tensor parallelism: torch's on one rank, megatron-core's on
several.

Both kinds have the same parameter names, and the same shapes up to the slice, so checkpoints and
the rest of the model treat them alike. megatron-core is imported only if the model is tensor
parallel: a model on one rank then needs neither megatron-core nor a process group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.settings import TensorParallel
from megatron.utils.environment import check_version


def column_linear(
    input_size: int, output_size: int, *, bias: bool, tp: TensorParallel
) -> nn.Module:
    """`[..., input_size] -> [..., output_size / tp.size]`: output features are split over ranks."""
    if tp.size == 1:
        return nn.Linear(input_size, output_size, bias=bias)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = ColumnParallelLinear(
        input_size, output_size, bias=bias, gather_output=False, **_core_options(tp)
    )
    for parameter in layer.parameters():
        _mark_partition(parameter, 0)
    return _with_one_output(layer)


def row_linear(input_size: int, output_size: int, *, bias: bool, tp: TensorParallel) -> nn.Module:
    """`[..., input_size / tp.size] -> [..., output_size]`: the input features are split over the
    ranks, the partial outputs are summed.
    """
    if tp.size == 1:
        return nn.Linear(input_size, output_size, bias=bias)
    from megatron.core.tensor_parallel import RowParallelLinear

    options = _core_options(tp)
    layer = RowParallelLinear(
        input_size, output_size, bias=bias, input_is_parallel=True, skip_bias_add=False, **options
    )
    _mark_partition(layer.weight, 1)
    return _with_one_output(layer)


def vocab_embedding(vocab_size: int, hidden_size: int, *, tp: TensorParallel) -> nn.Module:
    """int64 `[b, s] -> [b, s, hidden_size]`: the vocabulary is split over the ranks."""
    if tp.size == 1:
        return nn.Embedding(vocab_size, hidden_size)
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    layer = VocabParallelEmbedding(vocab_size, hidden_size, **_core_options(tp))
    _mark_partition(layer.weight, 0)
    return layer


def sum_head_gradients(table: Tensor, tp: TensorParallel) -> Tensor:
    """Identity whose gradient is summed over the tensor-parallel group.

    Every rank computes a table of all heads, `[h, length]`, from replicated parameters, but uses
    only the rows of its own heads. The sum of the ranks' gradients is therefore the full gradient
    of the parameters.
    """
    if tp.size == 1:
        return table
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    return copy_to_tensor_model_parallel_region(table)


def gather_vocabulary(logits: Tensor, tp: TensorParallel) -> Tensor:
    """`[..., v / tp.size] -> [..., v]`, without gradients. (megatron-core's function allocates GPU
    memory.)
    """
    if tp.size == 1:
        return logits
    slices = [torch.empty_like(logits) for _ in range(tp.size)]
    dist.all_gather(slices, logits.detach().contiguous(), group=tensor_parallel_group(tp))
    return torch.cat(slices, dim=-1)


def tensor_parallel_group(tp: TensorParallel) -> dist.ProcessGroup | None:
    """The process group of the ranks that hold slices of this model; None on one rank."""
    if tp.size == 1:
        return None
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def full_shape(tensor: Tensor, tensor_size: int) -> torch.Size:
    """The tensor's shape before tensor-parallel slicing and ZeRO 3's partitioning."""
    shape = list(getattr(tensor, "ds_shape", tensor.shape))
    if getattr(tensor, "tensor_model_parallel", False):
        # megatron-core sets this attribute.
        shape[tensor.partition_dim] *= tensor_size  # type: ignore[attr-defined]
    return torch.Size(shape)


def slice_for_rank(tensor: Tensor, full: Tensor, tensor_rank: int) -> Tensor:
    """This tensor-parallel rank's slice of `full`, an unsliced value for `tensor`."""
    if not getattr(tensor, "tensor_model_parallel", False):
        return full
    dim: int = tensor.partition_dim  # type: ignore[attr-defined]  # set by megatron-core
    size = tensor.shape[dim]
    return full.narrow(dim, tensor_rank * size, size)


def _core_options(tp: TensorParallel) -> dict[str, Any]:
    """The arguments of each of megatron-core's layers."""
    check_version("megatron-core")
    from megatron.core import ModelParallelConfig

    config = ModelParallelConfig(
        tensor_model_parallel_size=tp.size,
        # Weights are created on the CPU, filled by `initialization.py`, and moved with the rest of
        # the model.
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.get_default_dtype(),
    )
    return {"config": config, "init_method": _skip}


def _skip(tensor: Tensor) -> None:
    """megatron-core requires an initializer even with perform_initialization=False."""


def _mark_partition(parameter: Any, dim: int) -> None:
    # megatron-core sets these attributes only when it initializes the weight itself. DeepSpeed's
    # gradient norm and our checkpoints read them.
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim


def _with_one_output(layer: nn.Module) -> nn.Module:
    """megatron-core's linear layers return (output, bias); make the layer return the output, as
    nn.Linear does.
    """
    layer.register_forward_hook(lambda module, args, output: output[0])
    return layer
