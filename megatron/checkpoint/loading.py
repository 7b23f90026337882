"""Loading into a run of any parallel layout: weights alone (finetune), or everything, so that training goes on as if it
had not stopped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import forward_pass, random_state, release
from megatron.checkpoint import state_dict as contents
from megatron.checkpoint.configuration import checkpoint_config, model_differences
from megatron.checkpoint.directory import find_whole_step, has_checkpoint, iteration_of
from megatron.checkpoint.layers import read_tensor
from megatron.checkpoint.manifest import find_damage, saved_by_this_project
from megatron.checkpoint.optimizer import SavedState, full_shape, slice_parameter
from megatron.checkpoint.sizes import check_sizes
from megatron.checkpoint.state import STATE_FILE, TrainingState
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config import Config
from megatron.model.settings import ModelSettings

Report = Callable[[str], None]


def locate_checkpoint(config: Config, layout, padded_vocab_size: int, report: Report) -> Path | None:
    """The folder that `load` means, or None if training starts anew. Its files are checked against the manifest, and
    its sizes against the configuration, before a model is built.

    `layout` is `megatron.training.distributed.Layout`; `report` prints once per run. Raises CheckpointError if the
    checkpoint is damaged, of another model size, or missing where `finetune` or `iteration` asks for one.
    """
    settings = config.checkpoint
    if settings.load is None:
        return None
    if not has_checkpoint(settings.load) and settings.iteration is None:
        if settings.finetune:
            raise CheckpointError(f"load: {settings.load}: holds no checkpoint (no file `latest`) to finetune from")
        report(f"load: {settings.load} holds no checkpoint; training starts anew")
        return None
    step = find_whole_step(
        settings.load,
        settings.iteration,
        fallback=settings.fallback,
        report=report,
        check=lambda folder: _damage_seen_by_any(layout, folder),
    )
    check_sizes(step, ModelSettings.from_config(config, padded_vocab_size))
    _check_same_model(step, config, report)
    return step


def _check_same_model(step: Path, config: Config, report: Report) -> None:
    """Weights fit many models; these are told apart by the configuration that the checkpoint carries. A finetuned
    model may differ from what it starts from, and says so; a resumed one may not.
    """
    try:
        saved = checkpoint_config(step, _of_the_run(config))
    except CheckpointError as error:
        report(f"{error}; whether it is the same model is not checked beyond its sizes")
        return
    differences = "; ".join(model_differences(saved, config))
    if not differences:
        return
    if not config.checkpoint.finetune:
        raise CheckpointError(
            f"{step}: is of another model: {differences}. Give the configuration it was trained with, or set finetune "
            "to start a new run from its weights all the same"
        )
    report(f"finetune: the new model differs from the one it starts from: {differences}")


def _of_the_run(config: Config) -> dict[str, Any]:
    """Keys that a checkpoint's configuration may not decide, from the run's own."""
    return {"pos_emb_module": config.model.pos_emb_module} if config.model.pos_emb_module else {}


def load_checkpoint(engine, config: Config, step: Path | None, report: Report) -> TrainingState:
    """Fill the engine from the checkpoint that `locate_checkpoint` found, and return where the run stands.

    `engine` is `megatron.training.engine.Engine`. Raises CheckpointError if a file cannot be used.
    """
    if step is None:
        return TrainingState()
    contents.load_weights(engine, step)
    if config.checkpoint.finetune:
        engine.refresh_masters()
        report(f"finetune: weights from {step}; optimizer, schedule and data start anew")
        state = TrainingState()
    else:
        state = _go_on(engine, config, step, report)
        report(f"loaded {step}: iteration {state.iteration}, {state.consumed_samples} samples read")
    if config.checkpoint.checkpoint_validation_with_forward_pass:
        _compare_logits(engine, step, report)
    return state


def _damage_seen_by_any(layout, step: Path) -> str | None:
    """Each rank checks a part of the files; all of them learn of the damage."""
    found: list[str | None] = [None] * layout.world_size
    dist.all_gather_object(found, find_damage(step, share=(layout.rank, layout.world_size)))
    return next((damage for damage in found if damage), None)


def _go_on(engine, config: Config, step: Path, report: Report) -> TrainingState:
    """Everything but the weights."""
    settings = config.checkpoint
    path = step / STATE_FILE
    saved = load_file(path) if path.is_file() else {}
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: holds a {type(saved).__name__} instead of a dictionary; the file is damaged")
    if "training" not in saved:
        if saved_by_this_project(step):
            raise CheckpointError(f"{path}: does not say where the run stands; the checkpoint is not whole")
        return _go_on_from_release(engine, config, step, saved, report)
    contents.check_run_state(saved, path)
    state = TrainingState.from_dict(saved["training"])
    if saved["global_batch"] != engine.global_batch:
        report(
            f"{step}: was saved with {saved['global_batch']} samples per step, this run takes {engine.global_batch}; "
            "the data goes on where it stood, the schedule counts steps"
        )
    if saved["shape"] != engine.shape():
        was, now = (
            ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in s.items()) for s in (saved["shape"], engine.shape())
        )
        report(f"{step}: was saved with {was}; its state is cut anew for {now}")
    optimizer = None if settings.no_load_optim or saved["optimizer_left_out"] else SavedState(step)
    if optimizer is None:
        engine.refresh_masters()
        report("the optimizer's state was not loaded: " + ("no-load-optim" if settings.no_load_optim else "not saved"))
    else:
        load_optimizer(engine, optimizer, step)
    contents.restore_counters(engine, saved, loss_scale=optimizer is not None)
    if not settings.no_load_rng:
        _restore_random_states(engine, saved, step, report)
    return state


def load_optimizer(engine, saved: Any, step: Path) -> None:
    """Fill this rank's part of the optimizer's state from `saved` (a `SavedState`, or what looks like one), and the
    float32 weights it works on from there or, where they are not in it, from the layers' files of `step`.
    """
    layout = engine.layout
    names, pieces = contents.optimizer_pieces(engine)
    layers = contents.weight_layers(engine)
    places = {id(p): (index, name) for index, layer in layers.items() for name, p in layer.named_parameters()}
    engine.refresh_masters()

    def whole(name: str, kind: str) -> torch.Tensor | None:
        parameter = names[name]
        if saved.has(name, kind):
            tensor = saved.whole(name, kind, full_shape(parameter, layout.tensor_size))
        elif kind == "master" and parameter.dtype != torch.float32:
            # Saved in float32: the layer's file holds the very weights, of which the model took a rounded copy.
            tensor = read_tensor(step, *places[id(parameter)], full_shape(parameter, layout.tensor_size))
        else:
            return None
        return slice_parameter(parameter, tensor, layout.tensor_rank)

    missing = [name for name in names if not saved.has(name, "step")]
    if missing:
        raise CheckpointError(f"{step}: the optimizer's files lack {missing[0]}; the checkpoint is not whole")
    pieces.load(whole, saved.step)
    if engine.config.precision.dtype == "fp32" and hasattr(engine.engine.optimizer, "update_lp_params"):
        engine.engine.optimizer.update_lp_params()


def _restore_random_states(engine, saved: dict[str, Any], step: Path, report: Report) -> None:
    file = step / random_state.rank_file(engine.layout.rank)
    parallel = ("data_parallel", "pipeline_stages", "tensor_parallel")
    if not file.is_file():
        report(f"{step}: has no random states for these ranks; they are seeded anew")
    elif any(saved["shape"][size] != engine.shape()[size] for size in parallel):
        report(f"{step}: its random states are of other ranks than these; they are seeded anew")
    else:
        try:
            random_state.restore(load_file(file))
        except ValueError as error:
            raise CheckpointError(f"{file}: {error}; the file is damaged") from error


def _go_on_from_release(engine, config: Config, step: Path, saved: dict, report: Report) -> TrainingState:
    iteration = int(saved.get("iteration", iteration_of(step)))
    samples = saved.get("global_samples") or iteration * engine.global_batch
    state = TrainingState(iteration, int(samples), tokens=int(samples) * engine.seq_length)
    if config.checkpoint.no_load_optim:
        fits = "no-load-optim"
    else:
        optimizer, fits = release.read_optimizer(saved, step, contents.tied_output(engine))
    if fits is None:
        load_optimizer(engine, optimizer, step)
        report(f"{step}: not written by this project; weights, iteration and the optimizer's state are taken")
    else:
        engine.refresh_masters()
        report(
            f"{step}: not written by this project; weights and iteration are taken, the optimizer starts fresh ({fits})"
        )
    return state


def _compare_logits(engine, step: Path, report: Report) -> None:
    outcome: list[tuple[str | None, str | None]] = [(None, None)] * engine.layout.world_size
    try:
        mine = (forward_pass.compare(engine, step), None)
    except CheckpointError as error:
        mine = (None, str(error))
    dist.all_gather_object(outcome, mine)
    if error := next((error for _, error in outcome if error), None):
        raise CheckpointError(error)
    report(next(text for text, _ in outcome if text))
