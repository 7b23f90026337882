"""The optimizer's parameter groups, and the learning-rate schedule.

`megatron.optimizers.registry` lists the optimizers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from kerple.positional import PositionalMethod
from kerple.positional.base import MLPLayer
from megatron.checkpoint.optimizer import optimizer_fragments
from megatron.config import Config
from megatron.model.gpt import TransformerBlock
from megatron.model.settings import Layout
from megatron.optimizers.registry import build_optimizer
from megatron.optimizers.whole_parameters import WholeParameterOptimizer


def configure_optimizer(config: Config, model: nn.Module) -> tuple[torch.optim.Optimizer, str]:
    """The optimizer for a model, and a description of it for the log.

    Raises UserError if a library that the optimizer needs is not installed.
    """
    settings = config.optimizer
    factor = settings.positional_lr_factor
    separates_matrices = settings.spec.separates_matrices
    groups = parameter_groups(
        model, settings.weight_decay, factor, separates_matrices=separates_matrices
    )
    optimizer, description = build_optimizer(settings.name, groups, settings.all_params)
    if factor != 1:
        description += (
            f"; learning rate of the positional parameters: {factor:g} times that of the other "
            "parameters"
        )
    # Such an optimizer needs the matrices, of which ZeRO gives it only flat parts.
    if settings.spec.whole_parameters:
        optimizer = WholeParameterOptimizer(optimizer)
    optimizer.register_step_post_hook(lambda stepped, *_: project_masters(stepped))
    return optimizer, description


def attach(
    optimizer: WholeParameterOptimizer,
    engine: DeepSpeedEngine,
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
) -> None:
    """Tell the optimizer how DeepSpeed and tensor parallelism split the parameters, given by name.
    A collective.
    """
    # Without ZeRO, each replica has all of its tensor-parallel slice.
    size, group = layout.tensor_size, None
    if engine.zero_optimization():
        size *= layout.data_size
    if size > 1:
        group, _ = dist.new_subgroups(size)  # of consecutive ranks
    tensors = [tensor for options in optimizer.param_groups for tensor in options["params"]]
    # ZeRO 3 adds its tensors to the parameter groups only for a step.
    if engine.zero_optimization_partition_weights():
        tensors = engine.optimizer.fp32_partitioned_groups_flat
    split_dims = {}
    for name, parameter in parameters.items():
        if getattr(parameter, "tensor_model_parallel", False):
            # megatron-core sets this attribute.
            split_dims[name] = parameter.partition_dim  # type: ignore[attr-defined]
    fragments = optimizer_fragments(engine, parameters)
    optimizer.attach(
        fragments, tensors, split_dims=split_dims, tensor_rank=layout.tensor_rank, group=group
    )


@torch.no_grad()
def project_masters(optimizer: torch.optim.Optimizer) -> None:
    """Clamp the tensors of parameter groups with bounds.

    DeepSpeed's ZeRO and bf16 optimizers replace the parameters of each group with this rank's flat
    fp32 master weights, call the optimizer's step, and copy the master weights to the model.
    """
    for group in optimizer.param_groups:
        if "bounds" in group:
            for parameter in group["params"]:
                parameter.clamp_(*group["bounds"])


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    positional_lr_factor: float = 1.0,
    *,
    separates_matrices: bool = False,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups with the same weight decay, "bounds" and
    "lr_factor".

    Norms, biases and positional parameters have no weight decay: it would pull the parameters of a
    kernel towards the limits of their range. The weight matrices of a method's layers (DAPE, FIRE)
    have it, like all matrices. "bounds" are the limits of a positional parameter (lowest, highest
    or None), and "lr_factor" is `positional_lr_factor` for all parameters of positional methods;
    without them, a group has no such key.

    separates_matrices: put the weight matrices of transformer blocks, without those of the
    positional method, into a group with the key "matrices".
    """
    # What a parameter is: of a method, a matrix of it, bounded, or in a block.
    methods = [module for module in model.modules() if isinstance(module, PositionalMethod)]
    positional = {id(parameter) for method in methods for parameter in method.parameters()}
    inner = [module for method in methods for module in method.modules()]
    matrices = {id(module.weight) for module in inner if isinstance(module, nn.Linear | MLPLayer)}
    bounds: dict[int, Any] = {}
    for method in methods:
        for name, limits in method.bounds().items():
            bounds[id(method.get_parameter(name))] = limits
    blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}

    # Parameters with the same options form a group.
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        number = id(parameter)
        is_positional = number in positional
        decays = parameter.dim() >= 2
        if is_positional:
            decays = number in matrices

        # The options, which are also the key of the group.
        options: dict[str, Any] = {"weight_decay": 0.0}
        if decays:
            options["weight_decay"] = weight_decay
        if number in bounds:
            options["bounds"] = bounds[number]
        if is_positional and positional_lr_factor != 1:
            options["lr_factor"] = positional_lr_factor
        is_matrix = number in in_blocks and not is_positional and parameter.dim() == 2
        if separates_matrices and is_matrix:
            options["matrices"] = True
        key = (not decays, number in bounds, *options.items())
        groups.setdefault(key, {"params": [], **options})["params"].append(parameter)

    # Groups with weight decay come first, and groups with bounds last.
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


@dataclass(frozen=True)
class Schedule:
    """GPT-NeoX's learning-rate schedules.

    For optimizer step t (the first step has t = 0), W warmup steps and T decay steps, the warmup up
    to t = W is linear: lr * max(t, 1) / W, at most lr. After it, with u = (t - W) / (T - W):

        cosine       min_lr + (lr - min_lr)/2 (1 + cos(pi u))
        linear       lr (1 - u)
        exponential  lr e^(-0.693 u)
        constant     lr

    within [min_lr, lr]. From t = T on, cosine stays at min_lr (GPT-NeoX's would rise again). A run
    that is shorter than its warmup stays in it.

    `version` neox-2022 has the formulas of the original KERPLE code (GPT-NeoX, 2022): the warmup is
    lr * t / W, and after it t is at most T - W, u is (t - W) / T, and cosine is lr/2 (1 + cos(pi
    u)), which min_lr only bounds.
    """

    lr: float
    style: Literal["constant", "linear", "cosine", "exponential"]
    decay_steps: int
    warmup_steps: float
    min_lr: float = 0.0
    version: Literal["neox", "neox-2022"] = "neox"

    def __call__(self, step: int) -> float:
        """Learning rate at optimizer step `step`."""
        # Warmup.
        is_2022 = self.version == "neox-2022"
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            if not is_2022:
                step = max(step, 1)
            return self.lr * min(step / self.warmup_steps, 1.0)

        # The part of the decay that is over (u), and what cosine falls to.
        decay = self.decay_steps - self.warmup_steps
        progress, floor = 1.0, self.min_lr
        if is_2022:
            progress = max(min(step, decay) - self.warmup_steps, 0.0) / self.decay_steps
            floor = 0.0
        elif decay > 0:
            progress = (step - self.warmup_steps) / decay

        # The formulas of the styles.
        rate = self.lr
        if self.style == "cosine":
            half_turn = math.pi * min(progress, 1.0)
            rate = floor + (self.lr - floor) * 0.5 * (1 + math.cos(half_turn))
        elif self.style == "linear":
            rate = self.lr * (1 - progress)
        elif self.style == "exponential":
            rate = self.lr * math.exp(-0.693 * progress)
        return min(max(rate, self.min_lr), self.lr)

    def describe(self) -> str:
        """A line for the log."""
        return (
            f"learning rate: {self.style} from {self.lr:g}, at least {self.min_lr:g}, "
            f"{self.decay_steps:,} steps with {self.warmup_steps:,.0f} of warmup; formulas: "
            f"lr-schedule {self.version}"
        )

    def jump(self, start: int, last_rate: float | None) -> str | None:
        """A line for the log if the rate at step `start` does not continue the run. last_rate: that
        of the step before, or of `start` itself if it was skipped; None if it is not known.
        """
        rate = self(start)
        if last_rate is None:
            return None
        differences = [abs(self(step) - last_rate) for step in (start - 1, start)]
        if min(differences) <= 0.1 * max(last_rate, rate):
            return None
        return (
            f"the learning rate jumps from {last_rate:.3g} to {rate:.3g} at step {start:,}, "
            "because the schedule is not that of the run so far; compare train-iters, "
            "lr_decay_iters, warmup and lr"
        )
