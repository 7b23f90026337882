"""State of a training run besides weights and optimizer: progress, counters, random states.

All of it is saved as tensors and plain Python values, so that loading it runs no code.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from megatron.config import Config
from megatron.model.settings import Layout

# Counters of DeepSpeed's engine and its loss scaler that cannot be derived from the configuration.
# Its micro_steps must start at 0, because it updates the weights where they are a multiple of
# gradient_accumulation_steps, which may change.
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class TrainingEngine(Protocol):
    """The part of `megatron.training.engine.Engine` that saving and loading use."""

    config: Config
    seq_length: int
    global_batch: int
    deepspeed: Any  # DeepSpeed's engine
    model: Any

    @property
    def layout(self) -> Layout: ...

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer, of this rank."""

    def refresh_masters(self) -> None:
        """Copy the weights to the optimizer's float32 weights."""

    def shape(self) -> dict[str, int]:
        """The parallel layout: data_parallel, pipeline_stages, tensor_parallel, zero_stage."""


@dataclass
class TrainingState:
    """Progress of a run.

    Attributes:
        iteration: completed optimizer steps.
        consumed_samples: training sequences read by all replicas; the position in the data.
        consumed_valid_samples: the same for the validation data.
        tokens: training tokens read.
        lr_schedule: formulas of the learning-rate schedule, as the configuration key.
        data_order: identifies the order of the training samples to which consumed_samples refers;
            empty if unknown.
        learning_rate: of the last step; None if unknown.
        unlogged_losses: the losses of the steps since the last line of the log.
        evaluated_at: the last iteration at which the validation loss and extrapolation curves were
            measured.
        lineage: iterations of the checkpoints that led to this state, of those that the run saved
            to its folder.
        run: identifies the run in logs; resuming does not change it. Empty if unknown.
        folder, inode: the path and inode of the folder to which the run last saved.
        tokenizer: `Tokenizer.fingerprint`. Empty if unknown.
        data: absolute prefix -> `data_fingerprint` of the datasets with which the weights were
            trained, also before `finetune`.
        replaced_data: absolute prefixes whose contents in `data` were others before.
        code: `code_digests` of an external positional method.
        trained_documents: `data_fingerprint` -> first and one-past-last document of each dataset of
            which the weights were trained, also before `finetune`.
        earlier_recipes: `training_recipe` of each part of the training before the present one, such
            as before `finetune` or another learning rate.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    tokens: int = 0
    lr_schedule: Literal["neox", "neox-2022"] = "neox"
    data_order: str = ""
    learning_rate: float | None = None
    unlogged_losses: list[float] = field(default_factory=list)
    evaluated_at: int = 0
    lineage: list[int] = field(default_factory=list)
    run: str = ""
    folder: str = ""
    inode: int = 0
    tokenizer: str = ""
    data: dict[str, str] = field(default_factory=dict)
    replaced_data: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    trained_documents: dict[str, tuple[int, int]] = field(default_factory=dict)
    earlier_recipes: list[str] = field(default_factory=list)


def gathered(
    engine: TrainingEngine, layer: nn.Module, modifier_rank: int | None = None
) -> GatheredParameters:
    """Context manager in which the layer's parameters are complete under ZeRO 3."""
    enabled = engine.deepspeed.zero_optimization_partition_weights()
    return GatheredParameters(
        list(layer.parameters()), modifier_rank=modifier_rank, enabled=enabled
    )


def run_state(engine: TrainingEngine, config: Config, state: TrainingState) -> dict[str, Any]:
    """The contents of `mp_rank_00_model_states.pt`, as plain Python values."""
    scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
    scaler_fields = [name for name in SCALER_FIELDS if hasattr(scaler, name)]
    return {
        "iteration": state.iteration,
        "training": asdict(state),
        "shape": engine.shape(),
        "global_batch": engine.global_batch,
        "precision": config.precision.dtype,
        "optimizer": config.optimizer.name,
        "optimizer_left_out": config.checkpoint.no_save_optim,
        "counters": {name: int(getattr(engine.deepspeed, name)) for name in COUNTERS},
        "loss_scaler": {name: getattr(scaler, name) for name in scaler_fields},
    }


def restore_counters(engine: TrainingEngine, saved: Mapping[str, Any], *, loss_scale: bool) -> None:
    """Restore the counters of DeepSpeed's engine from `run_state`, and with `loss_scale` a dynamic
    loss scale, unless the saved one was constant.
    """
    for name in COUNTERS:
        setattr(engine.deepspeed, name, saved["counters"][name])
    scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
    if loss_scale and getattr(scaler, "dynamic", False) and "cur_iter" in saved["loss_scaler"]:
        for name, value in saved["loss_scaler"].items():
            setattr(scaler, name, value)


def random_state_file(rank: int) -> str:
    return f"random_rank_{rank:05d}.pt"


def capture_random_state() -> dict[str, Any]:
    """State of the generators of Python, NumPy and torch (CPU, and the current GPU)."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 (the generator that libraries share)
    kind, keys, position, has_gauss, cached = numpy_state
    cuda = None
    if torch.cuda.is_available():
        cuda = torch.cuda.get_rng_state()
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `capture_random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, cached)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
