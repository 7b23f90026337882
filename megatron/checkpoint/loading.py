"""Loading into a run: weights alone (finetune, another layout's file), or everything, so that training goes on as if
it had not stopped.
"""

from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint import random_state
from megatron.checkpoint.directory import find_step, has_checkpoint
from megatron.checkpoint.state import TrainingState
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config import Config


def load_checkpoint(engine, config: Config, report: Callable[[str], None]) -> TrainingState:
    """Fill the engine from `config.checkpoint.load` and return where the run stands; a new state if there is nothing
    to load.

    `engine` is `megatron.training.engine.Engine`; `report` prints once per run what was loaded and what was not.
    Raises CheckpointError if the checkpoint is damaged, of another model size, or missing where `finetune` or
    `iteration` asks for one.
    """
    settings = config.checkpoint
    if settings.load is None:
        return TrainingState()
    if not has_checkpoint(settings.load) and settings.iteration is None:
        if settings.finetune:
            raise CheckpointError(f"load: {settings.load}: holds no checkpoint (no file `latest`) to finetune from")
        report(f"load: {settings.load} holds no checkpoint; training starts anew")
        return TrainingState()
    step = find_step(settings.load, settings.iteration)
    if settings.finetune:
        _load_weights(engine, step)
        report(f"finetune: weights from {step}; optimizer, schedule and data start anew")
        return TrainingState()
    state = _load_all(engine, config, step, report)
    report(f"loaded {step}: iteration {state.iteration}, {state.consumed_samples} samples read")
    return state


def _load_weights(engine, step: Path) -> None:
    engine.engine.layers_directory = step
    engine.engine.load_module_state_dict(None)
    engine.refresh_masters()


def _load_all(engine, config: Config, step: Path, report: Callable[[str], None]) -> TrainingState:
    settings, layout, ds_engine = config.checkpoint, engine.layout, engine.engine
    saved = load_file(_rank_file(engine, step))
    if "training" not in saved:
        _load_weights(engine, step)
        state = TrainingState(iteration=int(saved.get("iteration", 0)))
        state.consumed_samples = state.iteration * engine.global_batch
        report(f"{step}: not written by this project; weights and iteration are taken, the optimizer starts fresh")
        return state
    if settings.no_load_optim or saved.get("optimizer_left_out"):
        _load_weights(engine, step)
        report("the optimizer's state was not loaded: " + ("no-load-optim" if settings.no_load_optim else "not saved"))
    else:
        _check_shape(saved, engine, step)
        ds_engine.layers_directory = step
        path, _ = ds_engine.load_checkpoint(str(step.parent), tag=step.name)
        if path is None:
            raise CheckpointError(f"{step}: DeepSpeed's files are missing; the checkpoint is not whole")
    if not settings.no_load_rng:
        file = step / f"random_rank_{layout.rank:05d}.pt"
        if file.is_file():
            random_state.restore(load_file(file))
        else:
            report(f"{step}: has no random states for these ranks; they are seeded anew")
    return TrainingState.from_dict(saved["training"])


def _rank_file(engine, step: Path) -> Path:
    path = Path(engine.engine._get_ckpt_name(str(step.parent), step.name))
    return path if path.is_file() else step / "mp_rank_00_model_states.pt"


def _check_shape(saved: dict, engine, step: Path) -> None:
    """The optimizer's files are one per rank: they fit the layout they were saved in."""
    shapes = saved["shape"], engine.shape()
    if shapes[0] == shapes[1]:
        return
    was, now = (", ".join(f"{name.replace('_', ' ')} {size}" for name, size in shape.items()) for shape in shapes)
    raise CheckpointError(
        f"{step}: was saved with {was}; this run has {now}. Resume in the same layout, "
        "or set no-load-optim to go on with a fresh optimizer, or finetune to start anew from its weights"
    )
