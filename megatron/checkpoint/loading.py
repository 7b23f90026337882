"""Loading a checkpoint into a training run: weights only (finetune), or everything (resume)."""

from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import (
    UnavailableMethod,
    code_notice,
    files_notice,
    model_differences,
    replaces_positional_method,
    saved_config,
    saved_training,
)
from megatron.checkpoint.directory import (
    MANIFEST,
    STATE_FILE,
    find_step,
    iteration_of,
    looks_like_checkpoint,
    read_state_file,
    saved_by_this_project,
    step_folder,
    tag_for,
)
from megatron.checkpoint.layers import (
    check_sizes,
    embedding_rows,
    load_layers,
    open_layers,
    tied_output,
    weight_layers,
)
from megatron.checkpoint.manifest import find_damage, find_valid_step
from megatron.checkpoint.optimizer import load_optimizer, read_optimizer, read_original_optimizer
from megatron.checkpoint.recipe import earlier_recipes, training_notice
from megatron.checkpoint.state_dict import (
    TrainingEngine,
    TrainingState,
    gathered,
    random_state_file,
    restore_counters,
    restore_random_state,
)
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config import Config
from megatron.config.schema.output import CheckpointConfig
from megatron.model.settings import Layout, ModelSettings
from megatron.optimizers.registry import OPTIMIZERS, optimizer_setting
from megatron.tokenizer.tokenizer import padded_vocab_size
from megatron.utils.ranks import Report, run_on_all_ranks, run_on_rank_0

# A vocabulary that is padded for at most this tensor-parallel size is that of the configured
# tokenizer.
MAX_TENSOR_PARALLEL = 64


def locate_checkpoint(config: Config, layout: Layout, report: Report) -> Path | None:
    """The global_stepN directory that `load` refers to, or None to train from scratch.

    Verifies its files against the manifest. `report` prints once per run. Raises CheckpointError if
    the checkpoint is damaged, or missing although `finetune` or `iteration` asks for one.
    """
    settings = config.checkpoint
    if settings.load is None:
        return None
    load = settings.load

    def starts_from_scratch() -> bool:
        from_scratch = settings.iteration is None and not looks_like_checkpoint(load)
        if from_scratch and settings.finetune:
            raise CheckpointError(f"load: {load}: no checkpoint to finetune from")
        return from_scratch

    if run_on_rank_0(starts_from_scratch):
        report(f"load: {load} contains no checkpoint; training starts from scratch")
        return None

    # Once, on rank 0: if another run saves to the folder, `latest` changes at any time.
    def chosen_iteration() -> int | None:
        try:
            return iteration_of(find_step(load, settings.iteration))
        except CheckpointError:
            return settings.iteration

    iteration = run_on_rank_0(chosen_iteration)
    if iteration is not None:
        manifest = step_folder(Path(load), tag_for(iteration)) / MANIFEST

        def manifest_here() -> bytes | None:
            if not manifest.is_file():
                return None
            return manifest.read_bytes()

        if len(set(run_on_all_ranks(manifest_here))) > 1:
            raise CheckpointError(
                f"load: {load} does not have the same checkpoint of iteration {iteration} on all "
                "hosts; use a folder that they share, or copy the checkpoint to each of them"
            )

    def damage_seen_by_any_rank(step: Path) -> str | None:
        """Each rank checks a part of the files."""
        share = (layout.rank, layout.world_size)
        damages = run_on_all_ranks(lambda: find_damage(step, share=share))
        return next(filter(None, damages), None)

    return find_valid_step(
        load, iteration, fallback=settings.fallback, report=report, check=damage_seen_by_any_rank
    )


def checkpoint_vocab_size(
    step: Path, config: Config, tokenizer_size: int, tensor_size: int, report: Report
) -> int:
    """The padded vocabulary size of a run that starts from a checkpoint: `padded_vocab_size`, or
    else that of the checkpoint, which depends on the tensor-parallel size with which its run was
    started.

    tokenizer_size: number of tokens. tensor_size: tensor-parallel size of this run. Raises
    CheckpointError if the checkpoint's size is not a padding of the tokenizer's vocabulary, or
    cannot be split over the ranks.
    """
    if config.model.padded_vocab_size is not None:
        return config.model.padded_vocab_size
    divisor = config.model.make_vocab_size_divisible_by
    rows = embedding_rows(open_layers(step, [0]), step)
    default = padded_vocab_size(tokenizer_size, divisor, tensor_size)
    if rows == default:
        return rows

    # Padding for another tensor-parallel size is accepted, any other size is another vocabulary.
    paddings = set()
    for ranks in range(1, MAX_TENSOR_PARALLEL + 1):
        paddings.add(padded_vocab_size(tokenizer_size, divisor, ranks))
    if rows not in paddings:
        raise CheckpointError(
            f"{step}: its vocabulary is padded to {rows:,} tokens, but the tokenizer's "
            f"{tokenizer_size:,} to {default:,} (make_vocab_size_divisible_by {divisor}, "
            f"model_parallel_size {tensor_size}). If the checkpoint was trained with this "
            f"tokenizer, set padded_vocab_size to {rows}"
        )
    if rows % tensor_size:
        raise CheckpointError(
            f"{step}: its vocabulary, padded to {rows:,} tokens (padded_vocab_size), cannot be "
            f"split over model_parallel_size {tensor_size}; choose a divisor of {rows}"
        )
    report(
        f"vocabulary padded to {rows:,} as in {step} (instead of {default:,}, for "
        f"model_parallel_size {tensor_size})"
    )
    return rows


def check_model(step: Path, config: Config, vocab_size: int, report: Report) -> None:
    """Compare the checkpoint's sizes and model settings with the configuration before a model is
    built. Raises CheckpointError if it is of another model, and UserError if the files of its
    configuration are of different models.
    """
    settings = config.checkpoint
    new_method = _new_positional_method(step, config)
    check_sizes(step, ModelSettings(config.model, vocab_size), positional=not new_method)
    # The same weights fit several models; the checkpoint's configuration tells them apart.
    saved = None
    try:
        saved = saved_config(step, config)
        differences = "; ".join(model_differences(saved, config))
    except UnavailableMethod as error:
        differences = str(error)
    except CheckpointError as error:
        report(f"{error}; only its sizes are compared with the configured model")
        return
    if saved is not None and (notice := files_notice(step)):
        report(notice)
    rounding = config.model.release_bf16_distances
    if saved is not None and saved.model.release_bf16_distances != rounding:
        report(
            f"{step}: saved with release_bf16_distances {not rounding}, this run uses {rounding}: "
            "distances are rounded differently from now on"
        )
    if differences and not settings.finetune:
        raise CheckpointError(
            f"{step}: is a checkpoint of a different model: {differences}. Use the configuration "
            "it was trained with, or set finetune to start a new run from its weights anyway"
        )
    if differences:
        report(f"finetune: the new model differs from the one it starts from: {differences}")
    if not new_method and (notice := code_notice(step, config)):
        report(notice)
    if new_method:
        report(
            "finetune: the checkpoint's positional parameters are not used; those of "
            f"{config.model.pos_emb} are new"
        )


def resumable_config(config: Config) -> Config | None:
    """The configuration that resumes this run from `save`; None if `save` has no checkpoints, or if
    the run loads the latest of them anyway. The configuration in the latest checkpoint tells
    whether the run is the same: it was started with the same `load`, `iteration` and `finetune`.

    Raises CheckpointError if `save` contains checkpoints of another run, which this one would
    overwrite. With `finetune`, they may be in the folder that `load` names: then they are those to
    start from.
    """
    settings = config.checkpoint
    if settings.save is None or not looks_like_checkpoint(settings.save):
        return None

    # A run that loads the latest checkpoint of `save`, and everything in it, resumes anyway.
    is_same = same_folder(settings.save, settings.load)
    leaves_out = settings.finetune or settings.no_load_optim or settings.no_load_rng
    if is_same and not leaves_out and settings.iteration is None:
        return None

    # The run whose checkpoints these are.
    saved, problem = None, ""
    try:
        saved = saved_config(find_step(settings.save), config).checkpoint
    except CheckpointError as error:
        problem = f"checkpoints of an unknown run ({error})"
    if saved is not None and _starts_like(saved, settings):
        # The state that it left out when it started is not to be left out again.
        resumed: dict[str, Any] = {
            "load": settings.save,
            "finetune": False,
            "iteration": None,
            "no_load_optim": settings.no_load_optim and not saved.no_load_optim,
            "no_load_rng": settings.no_load_rng and not saved.no_load_rng,
        }
        return config.model_copy(update={"checkpoint": settings.model_copy(update=resumed)})
    if is_same:
        return None
    if not problem:
        start = "scratch"
        if settings.load:
            start = f"load: {settings.load}"
            if settings.iteration is not None:
                start += f", iteration: {settings.iteration}"
        if settings.finetune:
            start += " with finetune"
        problem = f"checkpoints of another run, which was not started from {start}"
    raise CheckpointError(
        f"save: {settings.save} already contains {problem}. Choose another save; or, to resume "
        "that run, set load to its folder, without finetune and iteration"
    )


def _starts_like(saved: CheckpointConfig, settings: CheckpointConfig) -> bool:
    """Whether two runs start from the same checkpoint in the same way, or both from scratch."""
    if saved.finetune != settings.finetune or saved.iteration != settings.iteration:
        return False
    return saved.load == settings.load or same_folder(saved.load, settings.load)


def same_folder(first: str | None, second: str | None) -> bool:
    if first is None or second is None:
        return False
    return Path(first).resolve() == Path(second).resolve()


def _new_positional_method(step: Path, config: Config) -> bool:
    """Whether the run starts from the weights of a model with another positional method."""
    if not config.checkpoint.finetune:
        return False
    try:
        return replaces_positional_method(saved_config(step, config), config)
    except UnavailableMethod:
        return True
    except CheckpointError:
        return False


def load_checkpoint(
    engine: TrainingEngine, config: Config, step: Path | None, report: Report
) -> TrainingState:
    """Load the checkpoint that `locate_checkpoint` returned into the engine, and return the run's
    progress. Raises CheckpointError if a file cannot be used.
    """
    if step is None:
        return TrainingState()
    load_weights(engine, step, positional=not _new_positional_method(step, config))
    if config.checkpoint.finetune:
        engine.refresh_masters()
        report(
            f"finetune: weights from {step}; optimizer, schedule and data start from the beginning"
        )
        state, trained = TrainingState(), saved_training(step)
        state.data = trained.get("data", {})
        state.replaced_data = trained.get("replaced_data", [])
        state.trained_documents = trained.get("trained_documents", {})
    else:
        state = _resume(engine, config, step, report)
        report(f"loaded {step}: iteration {state.iteration}, {state.consumed_samples} samples read")
        trains = state.iteration < config.schedule.last_iteration
        if trains and (notice := training_notice(step, config)):
            report(notice)
    state.earlier_recipes = earlier_recipes(step, config, engine.global_batch)
    return state


def load_weights(engine: TrainingEngine, step: Path, *, positional: bool = True) -> None:
    """Fill the rank's layers from a checkpoint of any parallel layout. positional: False leaves the
    positional method's parameters as they are. Raises CheckpointError before changing a layer whose
    file does not fit.
    """
    layout, layers = engine.layout, weight_layers(engine.layers(), engine.config.model)
    states = open_layers(step, layers)
    for index, layer in layers.items():
        with gathered(engine, layer, modifier_rank=0):
            load_layers(
                {index: layer},
                step,
                states=states,
                tensor_size=layout.tensor_size,
                tensor_rank=layout.tensor_rank,
                positional=positional,
            )
    if layout.pipeline_size > 1:
        engine.model.synchronize_shared()


def _resume(engine: TrainingEngine, config: Config, step: Path, report: Report) -> TrainingState:
    """Load everything except the weights."""
    # A checkpoint of the original code has no training state.
    settings = config.checkpoint
    path = step / STATE_FILE
    saved = read_state_file(step)
    if "training" not in saved:
        if saved_by_this_project(step):
            raise CheckpointError(
                f"{path}: the entry training is missing; the checkpoint is incomplete"
            )
        return _resume_original(engine, config, step, saved, report)

    # Where the run continues. In a new folder, it is another run, without earlier checkpoints.
    try:
        state = TrainingState(**saved["training"])
    except TypeError as error:
        raise CheckpointError(
            f"{path}: was saved by another version of this project ({error}); resume with that one"
        ) from error
    if not same_folder(settings.load, settings.save):
        state.lineage, state.run = [], ""

    # A different number of ranks or samples per step is allowed.
    if saved["global_batch"] != engine.global_batch:
        report(
            f"{step}: saved with {saved['global_batch']} samples per step, this run uses "
            f"{engine.global_batch}; the data continues at the same sample, the schedule at the "
            "same step"
        )
    shape = engine.shape()
    if saved["shape"] != shape:
        before, now = _shape_text(saved["shape"]), _shape_text(shape)
        report(f"{step}: saved with {before}; resharding its state for {now}")

    # Optimizer state, or float32 weights that match the loaded ones.
    load_optimizer_state = not settings.no_load_optim and not saved["optimizer_left_out"]
    if load_optimizer_state:
        before, now = saved.get("optimizer", "adam"), config.optimizer.name
        if OPTIMIZERS[before].state_tensors != OPTIMIZERS[now].state_tensors:
            raise CheckpointError(
                f"{step}: has the state of {optimizer_setting(before)}, which {now} cannot use; "
                "use the optimizer that saved it, or set no_load_optim to continue with a new "
                "optimizer state"
            )
        load_optimizer(engine, read_optimizer(step), step)
    else:
        engine.refresh_masters()
        reason = "it was not saved"
        if settings.no_load_optim:
            reason = "no-load-optim"
        report(f"optimizer state not loaded: {reason}")
    restore_counters(engine, saved, loss_scale=load_optimizer_state)

    # Each rank has its own generators.
    if not settings.no_load_rng:
        file = step / random_state_file(engine.layout.rank)
        sizes_of_layout = ("data_parallel", "pipeline_stages", "tensor_parallel")
        same_ranks = all(saved["shape"][size] == shape[size] for size in sizes_of_layout)
        if file.is_file() and same_ranks:
            restore_random_state(load_file(file))
        elif file.is_file():
            report(
                f"{step}: its random states belong to a different parallel layout; the generators "
                "are reseeded"
            )
        else:
            report(f"{step}: has no random states for these ranks; the generators are reseeded")
    return state


def _shape_text(shape: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in shape.items())


def _resume_original(
    engine: TrainingEngine, config: Config, step: Path, saved: dict[str, Any], report: Report
) -> TrainingState:
    """Of a checkpoint of the KERPLE release or GPT-NeoX of 2022: iteration, samples, and Adam's
    state if it fits.
    """
    iteration: int = saved.get("iteration") or iteration_of(step)
    samples: int = saved.get("global_samples") or iteration * engine.global_batch
    if config.checkpoint.no_load_optim:
        reason: str | None = "no-load-optim"
    elif config.optimizer.spec is not OPTIMIZERS["adam"]:
        reason = f"it is Adam's, but the optimizer is {config.optimizer.name}"
    else:
        state_tensors = config.optimizer.spec.state_tensors
        optimizer, reason = read_original_optimizer(
            saved, step, tied_output(engine.config.model), state_tensors
        )
        if reason is None:
            load_optimizer(engine, optimizer, step)
            report(
                f"{step}: not saved by this project; loaded weights, iteration and optimizer state"
            )
    if reason is not None:
        engine.refresh_masters()
        report(
            f"{step}: not saved by this project; loaded weights and iteration, the optimizer "
            f"starts from scratch ({reason})"
        )
    state = TrainingState(iteration, samples, tokens=samples * engine.seq_length)
    # At iteration 0, no schedule has begun: the checkpoint was converted, for example from Hugging
    # Face.
    if iteration:
        state.lr_schedule = "neox-2022"
    return state
