"""Output projection and cross entropy in one, some tokens at a time: the logits `[tokens, vocabulary]` are never whole.

A piece's logits are made, turned into losses and into the gradients of hidden states and weight, and forgotten. The
gradients are made in the forward pass already, for the sum of the losses that count, so the projection is not computed
twice; the backward pass scales them.

Legend: n tokens, e hidden size, v vocabulary; c tokens in a piece.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements of a piece's logits.
PIECE = 2**26


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, counts: Tensor | None) -> Tensor:
    """Sum over tokens of counts * cross entropy in nats, a float32 scalar.

    hidden `[n, e]`, weight `[v, e]`, labels int64 `[n]`; counts float `[n]` gets no gradient, None counts every token
    as 1.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, counts)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, counts):
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if of_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, PIECE // weight.shape[0])
        for first in range(0, len(hidden), rows):
            piece = slice(first, first + rows)
            logits = F.linear(hidden[piece], weight).float()
            chosen = labels[piece, None]
            log_sum = logits.logsumexp(dim=1, keepdim=True)
            losses = (log_sum - logits.gather(1, chosen)).squeeze(1)
            total += (losses if counts is None else losses * counts[piece]).sum()
            if not (of_hidden or of_weight):
                continue
            gradient = logits.sub_(log_sum).exp_()
            gradient.scatter_add_(1, chosen, gradient.new_full(chosen.shape, -1.0))
            if counts is not None:
                gradient.mul_(counts[piece, None])
            gradient = gradient.to(hidden.dtype)
            if of_hidden:
                torch.mm(gradient, weight, out=hidden_gradient[piece])
            if of_weight:
                weight_gradient += gradient.T @ hidden[piece]
        # In the weight's dtype, as any linear layer's gradient is.
        weight_gradient = weight_gradient.to(weight.dtype) if of_weight else None
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight = (None if part is None else part * upstream.to(part.dtype) for part in ctx.saved_tensors)
        return hidden, weight, None, None
