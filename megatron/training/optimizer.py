"""The optimizer: Adam or AdamW, fused where that is to be had."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from kerple.positional import PositionalMethod
from megatron.config import Config, UserError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: what decays, and what does not (norms, biases, and positional parameters).

    Decay would pull a kernel's parameters to its bounds, so they are exempt whatever their shape. The matrices of a
    method's linear layers and convolutions (DAPE's and FIRE's MLPs) are matrices like any other, and decay.
    """
    methods = [module for module in model.modules() if isinstance(module, PositionalMethod)]
    matrices = {
        id(module.weight)
        for method in methods
        for module in method.modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d)
    }
    exempt = {id(parameter) for method in methods for parameter in method.parameters()} - matrices
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (kept if id(parameter) in exempt or parameter.dim() < 2 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimizer(config: Config, model: nn.Module, report: Callable[[str], None]) -> torch.optim.Optimizer:
    """Adam, with decoupled weight decay (which is what GPT-NeoX runs under `Adam` and `AdamW` alike) or, where
    `optimizer.params.adam_w_mode` is false, with the decay added to the gradient.

    `optimizer.params.apex` asks for apex's implementation instead of torch's. `report` is told which was taken.
    Raises UserError when apex is asked for and not installed.
    """
    settings = config.optimizer
    groups = parameter_groups(model, settings.weight_decay)
    options: dict = {"lr": settings.lr, "betas": tuple(settings.betas), "eps": settings.eps}
    decoupled = settings.params.get("adam_w_mode", True)
    if settings.params.get("apex", False):
        try:
            from apex.optimizers import FusedAdam
        except ImportError as error:
            raise UserError(
                "optimizer.params.apex: apex (NVIDIA's, built from source) is not installed; "
                "install it, or leave the key out to use torch's fused implementation"
            ) from error
        report("optimizer: apex FusedAdam")
        return FusedAdam(groups, adam_w_mode=decoupled, **options)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    report(f"optimizer: torch {cls.__name__}, fused")
    return cls(groups, fused=True, **options)


def set_learning_rate(groups: Iterable[dict], rate: float) -> None:
    for group in groups:
        group["lr"] = rate
