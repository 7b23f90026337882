"""Bias and weight as tables over distance.

Legend: h heads.
"""

import torch
from torch import Tensor


def tables(method, length: int, device: torch.device | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(bias, weight) of a positional method at distances 0 ... length-1, float32 `[h, length]`; None where it has none.

    Autograd carries a table's gradient back to the method's parameters.
    """
    if not (method.has_bias or method.has_weight):
        return None, None
    if device is None:
        device = next((tensor.device for tensor in (*method.parameters(), *method.buffers())), None)
    distance = torch.arange(length, dtype=torch.float32, device=device)
    return (
        method.bias(distance) if method.has_bias else None,
        method.weight(distance) if method.has_weight else None,
    )
