"""Output projection and cross entropy in one, some tokens at a time: the logits `[tokens, vocabulary]` are never whole.

A piece's logits are made, turned into losses and into the gradients of hidden states and weight, and forgotten. The
gradients are made in the forward pass already, for the sum of the losses that count, so the projection is not computed
twice; the backward pass scales them. Tensor-parallel ranks each hold a slice of the vocabulary: they share the sums of
a piece's exponentials and the labels' logits, and at the end sum the gradient of the hidden states.

Legend: n tokens, e hidden size, v vocabulary (of this rank); c tokens in a piece.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.model.linear import product

# Elements of a piece's logits. On a CPU so few that its caches hold them, which is faster than all at once, but no
# fewer rows than that, for each piece reads the whole weight, and reads and writes the whole of its gradient.
PIECE, CPU_PIECE, CPU_ROWS = 2**26, 2**21, 256


def largest_piece(device: torch.device, vocabulary: int) -> int:
    """Elements of logits at a time. Fewer than that are as fast when they are kept whole."""
    return min(PIECE, max(CPU_PIECE, CPU_ROWS * vocabulary)) if device.type == "cpu" else PIECE


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    counts: Tensor | None,
    *,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over tokens of counts * cross entropy in nats, a float32 scalar.

    hidden `[n, e]`, weight `[v, e]`, labels int64 `[n]`; counts float `[n]` gets no gradient, None counts every token
    as 1. With a group of ranks, `weight` is this rank's slice of the vocabulary and `first` the slice's first token.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, counts, first, group)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, counts, first, group):
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, largest_piece(hidden.device, len(weight)) // len(weight))
        for begin in range(0, len(hidden), rows):
            piece = slice(begin, begin + rows)
            logits = product(hidden[piece], weight).float()
            chosen = labels[piece, None] - first
            # 1 where the label is among this rank's tokens; elsewhere any token stands for it, and counts nothing.
            held = ((chosen >= 0) & (chosen < len(weight))).to(logits.dtype)
            chosen = chosen.clamp(0, len(weight) - 1)
            label_logits = logits.gather(1, chosen) * held
            highest = logits.amax(dim=1, keepdim=True)
            if group is not None:
                dist.all_reduce(label_logits, group=group)
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            exponentials = logits.sub_(highest).exp_()
            summed = exponentials.sum(dim=1, keepdim=True)
            if group is not None:
                dist.all_reduce(summed, group=group)
            losses = (summed.log() + highest - label_logits).squeeze(1)
            total += (losses if counts is None else losses * counts[piece]).sum()
            if not (of_hidden or of_weight):
                continue
            factors = torch.ones_like(summed) if counts is None else counts[piece, None].to(summed.dtype)
            gradient = exponentials.mul_(factors / summed).scatter_add_(1, chosen, -held * factors)
            gradient = gradient.to(hidden.dtype)
            if of_hidden:
                hidden_gradient[piece] = product(gradient, weight.T)
            if of_weight:
                weight_gradient += product(gradient.T, hidden[piece].T)
        if group is not None and of_hidden:
            dist.all_reduce(hidden_gradient, group=group)
        # In the weight's dtype, as any linear layer's gradient is.
        weight_gradient = weight_gradient.to(weight.dtype) if of_weight else None
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight = (None if part is None else part * upstream.to(part.dtype) for part in ctx.saved_tensors)
        return hidden, weight, None, None, None, None
