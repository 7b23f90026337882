"""Checks that the gradients of a positional method's parameters are finite, as training requires.

Legend: s tokens, h heads, d head size, e = h d.
"""

import torch

from kerple.attention.dispatch import Attention
from kerple.attention.tables import score_table, tables
from kerple.positional import PositionalMethod, decay_sums


def non_finite_gradients(method: PositionalMethod, heads: int, head_size: int, length: int = 16) -> list[str]:
    """The names of the method's parameters whose gradient is nan or inf after attention to `length` random tokens.

    A common cause is distance 0, where sqrt(a * distance) and (a * distance)**0.5 are finite, but their derivative is
    0/0. A single optimizer step then makes all weights nan.
    """
    names = [name for name, parameter in method.named_parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in method.parameters() if parameter.requires_grad]
    if not parameters:
        return []
    device, positions = parameters[0].device, torch.arange(length, device="cpu")
    hidden = torch.randn(3, length, heads * head_size, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.enable_grad():
        # The three rows become query, key and value.
        states = method.embed(hidden, positions).unflatten(-1, (heads, head_size)).transpose(1, 2)
        query, key, value = states.unsqueeze(1).unbind(0)
        query, key = method.rotate(query, key, positions, positions)
        bias, weight = tables(method, length, device)
        table = score_table(method, length, device) if method.modifies_scores else None
        sums = decay_sums(method.decay(hidden[:1])) if method.has_decay else None
        attention = Attention("reference", method)
        context = attention(query, key, value, bias_table=bias, weight_table=weight, table=table, decay_sums=sums)
        grads = torch.autograd.grad(context.square().sum(), parameters, allow_unused=True)
    return [name for name, grad in zip(names, grads, strict=True) if grad is not None and not grad.isfinite().all()]
