"""The optimizers, from torch and other libraries: how they are built, and which state a checkpoint has."""

from megatron.optimizers.registry import (
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    OptimizerName,
    OptimizerSpec,
    OptimizerType,
    build_optimizer,
    get_step,
    initialize_state,
    optimizer_setting,
    set_step,
    state_shape,
)

__all__ = [
    "OPTIMIZERS",
    "OTHER_OPTIMIZERS",
    "OptimizerName",
    "OptimizerSpec",
    "OptimizerType",
    "build_optimizer",
    "get_step",
    "initialize_state",
    "optimizer_setting",
    "set_step",
    "state_shape",
]
