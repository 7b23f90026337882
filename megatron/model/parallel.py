"""Linear and embedding layers that are torch's own on one rank and megatron-core's when the model is tensor parallel.

Both kinds have the same parameter names, and the same parameter shapes up to the slice, so nothing else needs to know
which is in use.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.linear import Linear


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place in the tensor-parallel group; megatron-core's parallel_state holds the group itself."""

    size: int = 1
    rank: int = 0

    def heads(self, num_heads: int) -> slice:
        """The heads this rank holds, of `num_heads` in all."""
        local = num_heads // self.size
        return slice(self.rank * local, (self.rank + 1) * local)


ONE_RANK = TensorParallel()


def column_linear(input_size: int, output_size: int, *, bias: bool, tp: TensorParallel) -> nn.Module:
    """`[..., input_size] -> [..., output_size / tp.size]`: the output features are split over the ranks."""
    if tp.size == 1:
        return Linear(input_size, output_size, bias=bias)
    from megatron.model import tensor_parallel

    return tensor_parallel.ColumnLinear(input_size, output_size, bias)


def row_linear(input_size: int, output_size: int, *, bias: bool, tp: TensorParallel) -> nn.Module:
    """`[..., input_size / tp.size] -> [..., output_size]`: the input features are split, the outputs summed over the
    ranks.
    """
    if tp.size == 1:
        return Linear(input_size, output_size, bias=bias)
    from megatron.model import tensor_parallel

    return tensor_parallel.RowLinear(input_size, output_size, bias)


def vocab_embedding(vocab_size: int, hidden_size: int, *, tp: TensorParallel) -> nn.Module:
    """int64 `[b, s] -> [b, s, hidden]`: the vocabulary is split over the ranks."""
    if tp.size == 1:
        return nn.Embedding(vocab_size, hidden_size)
    from megatron.model import tensor_parallel

    return tensor_parallel.Embedding(vocab_size, hidden_size)


def sum_head_gradients(table: Tensor, tp: TensorParallel) -> Tensor:
    """Identity whose gradient is summed over the tensor-parallel group.

    A table over all heads, `[h, length]`, comes from replicated parameters; each rank uses its own heads' rows, so
    each sees a part of the gradient, and the sum is the gradient of the whole.
    """
    if tp.size == 1:
        return table
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    return copy_to_tensor_model_parallel_region(table)


def tensor_parallel_group(tp: TensorParallel) -> dist.ProcessGroup | None:
    """The ranks that hold slices of the same model; None for one rank."""
    if tp.size == 1:
        return None
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def gather_vocabulary(logits: Tensor, tp: TensorParallel) -> Tensor:
    """`[..., v / tp.size] -> [..., v]`."""
    if tp.size == 1:
        return logits
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits)


def token_losses(logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
    """Cross entropy in nats of each token, float32 `[b, s]`, from this rank's slice of the logits, `[b, s, v /
    tp.size]`.
    """
    if tp.size == 1:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # It writes into its input, so it is given a copy.
    return vocab_parallel_cross_entropy(logits.to(torch.float32, copy=True), labels)


def mean_loss(logits: Tensor, labels: Tensor, mask: Tensor | None, tp: TensorParallel) -> Tensor:
    """Mean cross entropy in nats over the tokens whose mask (float `[b, s]`) is not zero; a scalar."""
    losses = token_losses(logits, labels, tp)
    if mask is None:
        return losses.mean()
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)
