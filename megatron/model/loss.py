"""Cross entropy of the next token, and a memory-saving version fused with the output projection.

`linear_cross_entropy` processes a chunk of tokens at a time, so the full logits `[tokens, vocabulary]` are never in
memory. The forward pass already computes the gradients with respect to the hidden states and the weight, so each
chunk's logits are computed only once; the backward pass scales them. Under tensor parallelism each rank holds a slice
of the vocabulary: the ranks sum the exponentials and the label logits of each chunk, and at the end the gradient of
the hidden states.

Legend: b batch, s tokens of a sequence, n tokens, e hidden size, v vocabulary (of this rank), c tokens of a chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.model.settings import TensorParallel

# Logits of a chunk. On a CPU a chunk should fit into the caches, which is faster than all tokens at once. It needs at
# least CPU_MIN_ROWS tokens, though, because every chunk reads the weight and updates the whole weight gradient.
CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS, CPU_MIN_ROWS = 2**26, 2**21, 256


def token_losses(logits: Tensor, labels: Tensor, tp: TensorParallel) -> Tensor:
    """Cross entropy of each token in nats, float32 `[b, s]`, from this rank's slice of the logits,
    `[b, s, v / tp.size]`.
    """
    if tp.size == 1:
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # vocab_parallel_cross_entropy overwrites its input.
    return vocab_parallel_cross_entropy(logits.to(torch.float32, copy=True), labels)


def mean_loss(logits: Tensor, labels: Tensor, mask: Tensor | None, tp: TensorParallel) -> Tensor:
    """Mean cross entropy in nats over the tokens with a non-zero mask (float `[b, s]`); a scalar."""
    losses = token_losses(logits, labels, tp)
    if mask is None:
        return losses.mean()
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def chunk_elements(device: torch.device, vocabulary: int) -> int:
    """Logits per chunk. If all logits are fewer than that, materializing them is as fast."""
    if device.type == "cpu":
        return min(CHUNK_ELEMENTS, max(CPU_CHUNK_ELEMENTS, CPU_MIN_ROWS * vocabulary))
    return CHUNK_ELEMENTS


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    *,
    first_token: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum of mask * cross entropy in nats over the tokens; a float32 scalar.

    hidden `[n, e]`, weight `[v, e]`, labels int64 `[n]`, mask float `[n]` without gradient, or None for all ones. With
    a process group, `weight` is this rank's slice of the vocabulary, which starts at token `first_token`.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, mask, first_token, group)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        first_token: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        hidden_needs_grad, weight_needs_grad = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if hidden_needs_grad else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight_needs_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, chunk_elements(hidden.device, len(weight)) // len(weight))
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            logits = (hidden[chunk] @ weight.T).float()
            # A label outside this rank's slice is replaced by an arbitrary one in it, with its contribution zeroed.
            local_labels = labels[chunk, None] - first_token
            is_local = ((local_labels >= 0) & (local_labels < len(weight))).to(logits.dtype)
            local_labels = local_labels.clamp(0, len(weight) - 1)
            label_logits = logits.gather(1, local_labels) * is_local
            max_logits = logits.amax(dim=1, keepdim=True)
            if group is not None:
                dist.all_reduce(label_logits, group=group)
                dist.all_reduce(max_logits, op=dist.ReduceOp.MAX, group=group)
            exponentials = logits.sub_(max_logits).exp_()
            denominator = exponentials.sum(dim=1, keepdim=True)
            if group is not None:
                dist.all_reduce(denominator, group=group)
            losses = (denominator.log() + max_logits - label_logits).squeeze(1)
            total += (losses if mask is None else losses * mask[chunk]).sum()
            if hidden_grad is None and weight_grad is None:
                continue
            # The gradient of the logits, softmax - one_hot(label), times the mask.
            factors = torch.ones_like(denominator) if mask is None else mask[chunk, None].to(denominator.dtype)
            logits_grad = exponentials.mul_(factors / denominator)
            logits_grad = logits_grad.scatter_add_(1, local_labels, -is_local * factors).to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad[chunk] = logits_grad @ weight
            if weight_grad is not None:
                weight_grad += logits_grad.T @ hidden[chunk]
        if group is not None and hidden_grad is not None:
            dist.all_reduce(hidden_grad, group=group)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = (
            None if gradient is None else gradient * upstream.to(gradient.dtype) for gradient in ctx.saved_tensors
        )
        return hidden_grad, weight_grad, None, None, None, None
