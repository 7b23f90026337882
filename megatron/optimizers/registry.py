"""Registry of optimizers: which ones the configuration accepts, and how they are built and
checkpointed.

To add an optimizer, add its name to `OptimizerType`, an entry to `OPTIMIZERS`, and new parameters
to the configuration schema. The config schema, training and checkpoints read this module. It
imports torch only when an optimizer is built, because the config must load without torch.

The state of most optimizers has one element per element of the parameter, so it can be partitioned
and resharded like the parameter; for the others, see `whole_parameters.py`. The step count is
stored separately, see `get_step`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron.utils.environment import check_version
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

# Values of GPT-NeoX's `optimizer.type`, in lower case, and two that it does not have: muon and
# adafactor.
OptimizerType = Literal["adam", "adamw", "lion", "sgd", "muon", "adafactor"]
# adam8bit is Adam with `use_bnb_optimizer`.
OptimizerName = OptimizerType | Literal["adam8bit"]

Groups = list[dict[str, Any]]  # PyTorch's parameter groups


@dataclass(frozen=True)
class OptimizerSpec:
    """An entry of the registry.

    build(groups, params) returns the optimizer and a description for the log; `params` are the
    complete parameters. It raises UserError if a required package is not installed.
    defaults: the values of the parameters that the YAML file does not set; other parameters are not
        accepted.
    state_tensors: names of the per-parameter state tensors, which start at zero. A parameter need
        not have all of them.
    whole_parameters: the update or its state needs each parameter in one piece, with its shape.
        `whole_parameters.py` assigns each parameter to a rank.
    separates_matrices: the groups must have the weight matrices of transformer blocks apart from
        other parameters, with the key "matrices".
    """

    build: Callable[[Groups, Mapping[str, Any]], tuple[Optimizer, str]]
    defaults: Mapping[str, Any]
    state_tensors: tuple[str, ...]
    whole_parameters: bool = False
    separates_matrices: bool = False


def _build_adam(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """Adam. GPT-NeoX decouples the weight decay for both `Adam` and `AdamW` unless adam_w_mode is
    false.
    """
    import torch

    lr, betas, eps = params["lr"], params["betas"], params["eps"]
    if params["apex"]:
        try:
            from apex.optimizers import FusedAdam
        except ImportError as error:
            raise UserError(
                "optimizer.params.apex: NVIDIA apex is not installed. Build it from source (`apex` "
                "on PyPI is an unrelated package), or remove this key to use PyTorch's fused Adam"
            ) from error
        decoupled = params["adam_w_mode"]
        optimizer = FusedAdam(groups, adam_w_mode=decoupled, lr=lr, betas=betas, eps=eps)
        return optimizer, "apex FusedAdam"
    optimizer_class: Any = torch.optim.Adam
    if params["adam_w_mode"]:
        optimizer_class = torch.optim.AdamW
    optimizer = optimizer_class(groups, lr=lr, betas=betas, eps=eps, fused=True)
    return optimizer, f"torch {optimizer_class.__name__}, fused"


def _build_lion(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675), with decoupled weight decay."""
    from lion_pytorch import Lion

    # The library rejects lr=0 as an argument, but not in a group.
    groups = [{**group, "lr": params["lr"]} for group in groups]
    return Lion(groups, betas=params["betas"]), "lion-pytorch Lion"


def _build_sgd(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """SGD. The weight decay is added to the gradient (L2)."""
    import torch

    momentum, nesterov = params["momentum"], params["nesterov"]
    # Not fused: if the first step is skipped, the fused implementation leaves the momentum
    # uninitialized.
    optimizer = torch.optim.SGD(groups, lr=params["lr"], momentum=momentum, nesterov=nesterov)
    description = f"torch SGD, momentum {momentum:g}"
    if nesterov:
        description += " (Nesterov)"
    return optimizer, description


def _build_muon(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    from megatron.optimizers.muon import MuonWithAdam

    return MuonWithAdam(groups, **params), (
        "torch Muon for the weight matrices of the blocks, with the learning rate scaled to the "
        "size of Adam's steps; torch AdamW, fused, for all other parameters"
    )


def _build_adafactor(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235), with decoupled weight
    decay.
    """
    import torch

    return torch.optim.Adafactor(groups, lr=params["lr"]), "torch Adafactor"


def _build_adam8bit(groups: Groups, params: Mapping[str, Any]) -> tuple[Optimizer, str]:
    """8-bit Adam (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861), with decoupled weight
    decay.
    """
    # Without a kernel for 4-bit matrices, which we do not use, importing the library prints a
    # warning.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        from bitsandbytes.optim import Adam8bit
    except ImportError as error:
        raise UserError(
            "use_bnb_optimizer: the package bitsandbytes is not installed. Install it (pip install "
            "'bitsandbytes>=0.50,<0.51'), or remove this key to use PyTorch's Adam"
        ) from error
    check_version("bitsandbytes")  # initialize_state and state_shape name its state
    optimizer = Adam8bit(groups, lr=params["lr"], betas=params["betas"], eps=params["eps"])
    return (
        optimizer,
        "bitsandbytes Adam8bit; the state of parameters with fewer than 4,096 elements is float32",
    )


_BLOCK = 256  # elements of a parameter with one scale in bitsandbytes' 8-bit state
_ADAM_DEFAULTS = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAM = OptimizerSpec(
    build=_build_adam,
    defaults={**_ADAM_DEFAULTS, "adam_w_mode": True, "apex": False},
    state_tensors=("exp_avg", "exp_avg_sq"),
)

OPTIMIZERS: dict[OptimizerName, OptimizerSpec] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adam8bit": OptimizerSpec(
        build=_build_adam8bit,
        defaults=_ADAM_DEFAULTS,
        state_tensors=("state1", "state2", "absmax1", "absmax2"),
        whole_parameters=True,
    ),
    "lion": OptimizerSpec(
        build=_build_lion,
        defaults={"lr": 0.001, "betas": (0.9, 0.99)},
        state_tensors=("exp_avg",),
    ),
    "sgd": OptimizerSpec(
        build=_build_sgd,
        defaults={"lr": 0.001, "momentum": 0.0, "nesterov": False},
        state_tensors=("momentum_buffer",),
    ),
    "muon": OptimizerSpec(
        build=_build_muon,
        defaults={**_ADAM_DEFAULTS, "momentum": 0.95, "nesterov": True},
        state_tensors=("momentum_buffer", "exp_avg", "exp_avg_sq"),
        whole_parameters=True,
        separates_matrices=True,
    ),
    "adafactor": OptimizerSpec(
        build=_build_adafactor,
        defaults={"lr": 0.001},
        state_tensors=("row_var", "col_var", "variance"),
        whole_parameters=True,
    ),
}


def optimizer_setting(name: OptimizerName) -> str:
    """The key and value that select an optimizer, for messages."""
    if name == "adam8bit":
        return "use_bnb_optimizer"
    return f"optimizer.type {name}"


def build_optimizer(
    name: OptimizerName, groups: Groups, params: Mapping[str, Any]
) -> tuple[Optimizer, str]:
    """The optimizer `name` with `params` over its defaults, and a description for the log."""
    spec = OPTIMIZERS[name]
    return spec.build(groups, {**spec.defaults, **params})


def get_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> int:
    """Steps that `parameter` of parameter group `group` has received; 0 before the first step, and
    for optimizers that do not count them (Lion, SGD, Muon).

    torch and bitsandbytes count per parameter, in `optimizer.state[parameter]["step"]`; apex counts
    per group, in `group["step"]`.
    """
    return int(optimizer.state.get(parameter, {}).get("step", group.get("step", 0)))


def set_step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, step: int) -> None:
    """Set the step count of a parameter when resuming; see `get_step`. A count of 0 is set, too:
    torch's Adam requires it in a state that exists, even if all steps so far were skipped.
    """
    import torch

    if type(optimizer).__module__.startswith("apex."):
        group["step"] = step
    elif isinstance(optimizer.state[parameter].get("step"), int):  # bitsandbytes
        optimizer.state[parameter]["step"] = step
    else:
        # torch's fused implementation requires it on the parameter's device.
        optimizer.state[parameter]["step"] = torch.tensor(float(step), device=parameter.device)


def initialize_state(
    optimizer: Optimizer, parameter: Tensor, state_tensors: Sequence[str]
) -> dict[str, Any]:
    """The state of `parameter`, with those of `state_tensors` that it lacks created as zeros.

    The libraries create the state at the first step, which is after a checkpoint is loaded.
    bitsandbytes creates it here too: its dtype depends on the size of the parameter, and it has the
    table from codes to numbers.
    """
    state = optimizer.state[parameter]
    if not state and hasattr(optimizer, "init_state"):
        for number, group in enumerate(optimizer.param_groups):
            for position, member in enumerate(group["params"]):
                if member is parameter:
                    optimizer.init_state(group, parameter, number, position)
    for name in state_tensors:
        if name not in state:
            state[name] = parameter.detach().new_zeros(state_shape(name, parameter.shape))
    return state


def state_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the state tensor `name` of a parameter of this shape. Adafactor stores the mean
    squares of the rows and columns of a matrix, and bitsandbytes one scale per block of the
    flattened parameter; all other tensors have the parameter's shape.
    """
    if name in ("absmax1", "absmax2"):
        return (-(-math.prod(shape) // _BLOCK),)
    if name == "row_var":
        return (*shape[:-1], 1)
    if name == "col_var":
        return (*shape[:-2], 1, shape[-1])
    return tuple(shape)
