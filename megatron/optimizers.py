"""Registry of optimizers: which ones `optimizer.type` accepts, and how they are built and checkpointed.

To add an optimizer, add its name to `OptimizerType`, its parameters to `OptimizerParams` and an entry to `OPTIMIZERS`.
The config schema, training and checkpoints read this module. It imports torch only when an optimizer is built, because
the config must load without torch.

Every state tensor has one element per element of its parameter, because ZeRO partitions parameters and optimizer state
as flat tensors. The step count is stored separately, see `get_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# Values of GPT-NeoX's `optimizer.type`, in lower case.
OptimizerType = Literal["adam", "adamw"]


class OptimizerParams(TypedDict):
    """Values of `optimizer.params`, with GPT-NeoX's names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    adam_w_mode: bool  # True: decoupled weight decay. False: weight decay is added to the gradient (L2).
    apex: bool  # use NVIDIA apex's FusedAdam instead of PyTorch's fused implementation


@dataclass(frozen=True)
class OptimizerSpec:
    """An entry of the registry.

    build(groups, params) returns the optimizer and a description for the log; `groups` are PyTorch parameter groups,
    `params` the complete parameters. It raises UserError if a required package is not installed.
    defaults: parameters that the YAML file does not set.
    state_tensors: names of the per-parameter state tensors, which start at zero; each has the parameter's shape.
    """

    build: Callable[[list[dict[str, Any]], OptimizerParams], tuple[Optimizer, str]]
    defaults: OptimizerParams
    state_tensors: tuple[str, ...]


def _build_adam(groups: list[dict[str, Any]], params: OptimizerParams) -> tuple[Optimizer, str]:
    """Adam. GPT-NeoX decouples the weight decay for both `Adam` and `AdamW` unless adam_w_mode is false."""
    import torch

    lr, betas, eps = params["lr"], params["betas"], params["eps"]
    if params["apex"]:
        try:
            from apex.optimizers import FusedAdam
        except ImportError as error:
            raise UserError(
                "optimizer.params.apex: NVIDIA apex is not installed. Build it from source (`apex` on PyPI is an "
                "unrelated package), or remove this key to use PyTorch's fused Adam"
            ) from error
        return FusedAdam(groups, adam_w_mode=params["adam_w_mode"], lr=lr, betas=betas, eps=eps), "apex FusedAdam"
    optimizer_class = torch.optim.AdamW if params["adam_w_mode"] else torch.optim.Adam
    optimizer = optimizer_class(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return optimizer, f"torch {optimizer_class.__name__}, fused"


_ADAM = OptimizerSpec(
    build=_build_adam,
    defaults={"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True, "apex": False},
    state_tensors=("exp_avg", "exp_avg_sq"),
)

OPTIMIZERS: dict[OptimizerType, OptimizerSpec] = {"adam": _ADAM, "adamw": _ADAM}


def build_optimizer(
    name: OptimizerType, groups: list[dict[str, Any]], params: Mapping[str, Any]
) -> tuple[Optimizer, str]:
    """Build the optimizer `name` with `params` over its defaults; returns it and a description for the log."""
    spec = OPTIMIZERS[name]
    complete: Any = {**spec.defaults, **params}
    return spec.build(groups, complete)


def get_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """Steps that `parameter` of parameter group `group` has received; 0 before the first step.

    torch counts per parameter, in `optimizer.state[parameter]["step"]`; apex counts per group, in `group["step"]`.
    """
    return int(optimizer.state.get(parameter, {}).get("step", group.get("step", 0)))


def set_step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, step: int) -> None:
    """Set the step count of a parameter when resuming; see `get_step`."""
    import torch

    if isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass
        # The fused implementation requires it on the parameter's device.
        optimizer.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)
    else:
        group["step"] = step


def initialize_state(optimizer: Optimizer, parameter: Tensor, state_tensors: tuple[str, ...]) -> dict[str, Any]:
    """The state of `parameter`, with its missing tensors created as zeros.

    torch and apex create the state at the first step, which is after a checkpoint is loaded.
    """
    import torch

    state = optimizer.state[parameter]
    for name in state_tensors:
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state
