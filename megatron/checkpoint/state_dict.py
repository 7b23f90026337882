"""What a rank puts into a checkpoint.

layer_XX-model_YY-model_states.pt   weights of layer XX, tensor-parallel slice YY (data-parallel rank 0)
optimizer_rank_NNNNN.pt             this rank's part of the optimizer's state
random_rank_NNNNN.pt                this rank's random states
mp_rank_00_model_states.pt          where the run stands (rank 0)
configs/config.yml                  the configuration (rank 0)
forward_pass.pt                     a batch and its logits, if the configuration asks for it
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from megatron.checkpoint import forward_pass, optimizer, random_state
from megatron.checkpoint.layers import layer_file, layer_state, load_layers
from megatron.checkpoint.state import STATE_FILE, TrainingState
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config
from megatron.utils.secrets import without_secrets

CONFIG_FILE = "configs/config.yml"

# What DeepSpeed's engine and its loss scaler count; the rest of them follows from the configuration.
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def rank_files(engine, config: Config, state: TrainingState) -> Iterator[tuple[str, Any]]:
    """(file name, contents) of this rank; every rank runs through it together. Tensors are live, and valid until the
    next file is asked for. Contents of type bytes are written as they are, all others by torch.save.
    """
    layout, settings = engine.layout, config.checkpoint
    for index, layer in weight_layers(engine).items():
        with gathered(engine, layer):
            if layout.data_rank == 0:
                yield layer_file(Path(), index, layout.tensor_rank).name, layer_state(layer)
    if not settings.no_save_optim and (layout.data_rank == 0 or engine.engine.zero_optimization()):
        yield optimizer.rank_file(layout.rank), optimizer_state(engine)
    if not settings.no_save_rng:
        yield random_state.rank_file(layout.rank), random_state.capture()
    if settings.checkpoint_validation_with_forward_pass:
        probe = forward_pass.capture(engine)
        if probe is not None:
            yield forward_pass.FILE, probe
    if layout.is_main:
        yield STATE_FILE, run_state(engine, config, state)
        # JSON is YAML: the file loads like any other configuration.
        yield CONFIG_FILE, (json.dumps(without_secrets(config.to_flat()), indent=2) + "\n").encode()


def weight_layers(engine) -> dict[int, nn.Module]:
    """The rank's layers that have files: all but an output layer that uses the embedding's weights."""
    tied = tied_output(engine)
    return {index: layer for index, layer in engine.layers().items() if index != tied}


def tied_output(engine) -> int | None:
    """Index of the output layer if its weights are the embedding's."""
    return engine.settings.num_layers + 4 if engine.settings.tied_embeddings else None


def gathered(engine, layer: nn.Module, modifier_rank: int | None = None) -> GatheredParameters:
    """Within it, the layer's parameters are whole, which under ZeRO 3 they otherwise are not."""
    enabled = engine.engine.zero_optimization_partition_weights()
    return GatheredParameters(list(layer.parameters()), modifier_rank=modifier_rank, enabled=enabled)


def load_weights(engine, step: Path) -> None:
    """Fill the rank's layers from a checkpoint of any layout. Raises CheckpointError before anything is changed in a
    layer whose file does not fit.
    """
    layout = engine.layout
    for index, layer in weight_layers(engine).items():
        with gathered(engine, layer, modifier_rank=0):
            load_layers({index: layer}, step, tensor_size=layout.tensor_size, tensor_rank=layout.tensor_rank)
    if layout.pipeline_size > 1:
        engine.model.synchronize_shared()


def optimizer_pieces(engine) -> tuple[dict[str, nn.Parameter], optimizer.OptimizerPieces]:
    """The rank's parameters by name, and what its optimizer holds of them."""
    names = optimizer.parameter_names(engine.layers(), tied_output(engine))
    return names, optimizer.OptimizerPieces(engine.engine, names)


def optimizer_state(engine) -> dict[str, Any]:
    _, pieces = optimizer_pieces(engine)
    with_master = engine.config.precision.dtype != "fp32"
    return {"tensor_rank": engine.layout.tensor_rank, "parameters": pieces.state(with_master=with_master)}


def run_state(engine, config: Config, state: TrainingState) -> dict[str, Any]:
    """What belongs to the run as a whole, as plain values."""
    scaler = getattr(engine.engine.optimizer, "loss_scaler", None)
    return {
        "iteration": state.iteration,
        "training": state.to_dict(),
        "shape": engine.shape(),
        "global_batch": engine.global_batch,
        "precision": config.precision.dtype,
        "optimizer_left_out": config.checkpoint.no_save_optim,
        "counters": {name: int(getattr(engine.engine, name)) for name in COUNTERS},
        "loss_scaler": {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)},
    }


# Of what `run_state` gives: the types that reading it relies on.
RUN_STATE = {
    "training": dict,
    "shape": dict,
    "global_batch": int,
    "optimizer_left_out": bool,
    "counters": dict,
    "loss_scaler": dict,
}


def check_run_state(saved: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError, naming `path`, for what `run_state` has not given."""
    for name, kind in RUN_STATE.items():
        if not isinstance(saved.get(name), kind):
            raise CheckpointError(f"{path}: its {name} is missing or is no {kind.__name__}; the file is damaged")
    missing = [name for name in COUNTERS if name not in saved["counters"]]
    if missing:
        raise CheckpointError(f"{path}: lacks the counter {missing[0]}; the file is damaged")


def restore_counters(engine, saved: dict[str, Any], *, loss_scale: bool) -> None:
    """Put back what `run_state` took of DeepSpeed's engine; the loss scale only if `loss_scale`."""
    for name in COUNTERS:
        setattr(engine.engine, name, saved["counters"][name])
    scaler = getattr(engine.engine.optimizer, "loss_scaler", None)
    if loss_scale and scaler is not None:
        for name, value in saved["loss_scaler"].items():
            setattr(scaler, name, value)
