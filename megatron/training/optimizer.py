"""The optimizer's parameter groups, and the learning-rate schedule.

`megatron.optimizers` lists the optimizers.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from kerple.positional import PositionalMethod
from megatron.config import Config
from megatron.optimizers import build_optimizer


def configure_optimizer(config: Config, model: nn.Module) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer for a model, and a description of it for the log.

    Raises UserError if `optimizer.params.apex` is true and apex is not installed.
    """
    settings = config.optimizer
    params: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    params.update(settings.params.items())
    optimizer, description = build_optimizer(settings.type, parameter_groups(model, settings.weight_decay), params)
    optimizer.register_step_post_hook(lambda stepped, *_: project_masters(stepped))
    return optimizer, description


@torch.no_grad()
def project_masters(optimizer: torch.optim.Optimizer) -> None:
    """Clamp the tensors of parameter groups with bounds.

    DeepSpeed's ZeRO and bf16 optimizers replace the parameters of each group by the flat fp32 master weights of this
    rank, call the optimizer's step, and copy the master weights to the model.
    """
    for group in optimizer.param_groups:
        if "bounds" in group:
            for parameter in group["params"]:
                parameter.clamp_(*group["bounds"])


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into a group with weight decay, a group without it, and one for each pair of
    bounds that positional parameters have ("bounds"; they have no weight decay).

    Norms, biases and positional parameters have no weight decay: it would pull the parameters of a kernel towards the
    limits of their range. The weight matrices of a method's linear and convolution layers (DAPE, FIRE) have it, like
    all matrices.
    """
    methods = [module for module in model.modules() if isinstance(module, PositionalMethod)]
    exempt = {id(parameter) for method in methods for parameter in method.parameters()}
    for method in methods:
        for module in method.modules():
            if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d):
                exempt.discard(id(module.weight))
    bounds = {id(method.get_parameter(name)): limits for method in methods for name, limits in method.bounds().items()}
    decay: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    no_decay: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    within: dict[tuple[float, float | None], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        limits = bounds.get(id(parameter))
        if limits is not None:
            group = within.setdefault(limits, {"params": [], "weight_decay": 0.0, "bounds": limits})
        else:
            group = no_decay if id(parameter) in exempt or parameter.dim() < 2 else decay
        group["params"].append(parameter)
    return [group for group in (decay, no_decay, *within.values()) if group["params"]]


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule of the KERPLE release (GPT-NeoX of 2022).

    For optimizer step t (the first step has t = 0), W warmup steps and T decay steps, t is clipped to T - W. The warmup
    is linear: lr * t / W up to t = W. After it, with u = t - W:

        cosine       lr/2 (1 + cos(pi u / T))
        linear       lr (T - u) / T
        exponential  lr e^(-0.693 u / T)
        constant     lr

    and never less than min_lr. As in the release, the period is T, not T - W.
    """

    lr: float
    style: Literal["constant", "linear", "cosine", "exponential"]
    decay_steps: int
    warmup_steps: float
    min_lr: float = 0.0

    def __call__(self, step: int) -> float:
        """Learning rate at optimizer step `step`."""
        clipped = min(step, self.decay_steps - self.warmup_steps)
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.lr * clipped / self.warmup_steps
        progress = (clipped - self.warmup_steps) / self.decay_steps if self.decay_steps else 0.0
        factor = {
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "linear": 1 - progress,
            "exponential": math.exp(-0.693 * progress),
            "constant": 1.0,
        }[self.style]
        return max(self.lr * factor, self.min_lr)
