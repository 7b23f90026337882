"""The positional methods in a model."""

from collections.abc import Iterator

import torch
from torch import nn

from kerple.positional.base import PositionalMethod


def outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, PositionalMethod]]:
    """(name, method) for the positional methods in a module that are no part of another one."""
    if isinstance(module, PositionalMethod):
        yield name, module
        return
    prefix = name and f"{name}."
    for child_name, child in module.named_children():
        yield from outermost(child, prefix + child_name)


@torch.no_grad()
def project(module: nn.Module) -> None:
    """Clamp the parameters of all positional methods in a module to their bounds, in place.

    Call it after each optimizer step. The authors' code does the same at the start of each forward
    pass. Without it, a parameter drifts beyond its bound, where it has no effect, and takes as many
    steps to return.
    """
    for method in module.modules():
        if isinstance(method, PositionalMethod):
            for name, (low, high) in method.bounds().items():
                method.get_parameter(name).clamp_(low, high)
