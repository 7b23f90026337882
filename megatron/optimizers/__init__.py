"""The optimizers, from torch and other libraries: how they are built, and which state a checkpoint has."""

from megatron.optimizers.registry import (
    OPTIMIZERS,
    OptimizerSpec,
    OptimizerType,
    build_optimizer,
    get_step,
    initialize_state,
    set_step,
    state_shape,
)

__all__ = [
    "OPTIMIZERS",
    "OptimizerSpec",
    "OptimizerType",
    "build_optimizer",
    "get_step",
    "initialize_state",
    "set_step",
    "state_shape",
]
