"""Keys of what a run writes: checkpoints (and what to load), logs, TensorBoard, Weights & Biases
and profiles.
"""

from collections.abc import Iterator
from typing import Literal

from megatron.config.schema.base import ConfigSection, Int, PathText, Steps, field

_MIN_FACTOR = 1.01


class CheckpointConfig(ConfigSection):
    """Checkpoint"""

    # Folders.
    save: PathText | None = field(
        None, "Folder to save checkpoints to. Default: do not save.", placeholders=True
    )
    load: PathText | None = field(
        None,
        """Folder of the checkpoint to start from. If it contains none, training prints this and
        starts from scratch. If save contains checkpoints of this run, it resumes from them.""",
        placeholders=True,
    )

    # When a checkpoint is saved, and how long it is kept.
    save_interval: float | None = field(
        None,
        """Optimizer steps between checkpoints; the last step is always saved. With checkpoint_scale
        log, the factor between the steps of consecutive checkpoints.""",
        aliases=("checkpoint_factor",),
        ge=1,
    )
    checkpoint_scale: Literal["linear", "log"] = field(
        "linear",
        "linear: checkpoints at multiples of save_interval; log: at its powers (1, ...), rounded "
        "down.",
    )
    extra_save_iters: Steps = field(
        (), "Additional steps at which to save a checkpoint. 0: before the first step."
    )
    keep_last_n_checkpoints: Int | None = field(
        None,
        """Delete all but this many of the run, and those that extra_save_iters and checkpoint_scale
        log ask for. Default: keep all.""",
        ge=1,
    )

    # What is loaded and saved.
    finetune: bool = field(
        False,
        """Load only the weights: a new optimizer, and training starts at step 0. The checkpoint
        must exist. If it has another positional method, the parameters of the new one are
        initialized.""",
    )
    no_load_optim: bool = field(False, "Do not load the optimizer state.")
    no_load_rng: bool = field(False, "Do not load the states of the random number generators.")
    no_save_optim: bool = field(
        False, "Do not save the optimizer state; training cannot be resumed exactly."
    )
    no_save_rng: bool = field(False, "Do not save the states of the random number generators.")
    fallback: bool = field(
        False,
        "If the checkpoint to load is damaged, load the newest intact one before it. Same as "
        "--fallback.",
    )

    # Differences from the checkpoint that are not errors.
    allow_other_tokenizer: bool = field(
        False,
        "Use the checkpoint with another tokenizer than the one it was trained with, instead of an "
        "error.",
    )
    allow_other_data: bool = field(
        False,
        "Resume a run although one of its datasets was built again with other contents under the "
        "same path.",
    )
    iteration: Int | None = field(
        None, "Step of the checkpoint to load. Default: the one named in `latest`.", ge=0
    )

    def contradictions(self) -> Iterator[str]:
        factor = self.save_interval
        if factor is not None and self.checkpoint_scale == "linear" and not factor.is_integer():
            yield f"save_interval {factor} must be an integer, unless checkpoint_scale is log"
        if factor is not None and factor < _MIN_FACTOR and self.checkpoint_scale == "log":
            yield (
                f"save_interval {factor} with checkpoint_scale log is the factor between the steps "
                f"of consecutive checkpoints; it must be at least {_MIN_FACTOR}"
            )
        if factor is None and self.checkpoint_scale == "log" and not self.extra_save_iters:
            yield (
                "checkpoint_scale log requires save_interval, the factor between steps; set it, or "
                "remove the key"
            )
        for name in ("finetune", "iteration"):
            value = getattr(self, name)
            if value is not None and value is not False and self.load is None:
                yield f"{name} is set, but load is not; set load to the folder of the checkpoint"

    def keeps(self, iteration: int) -> bool:
        """Whether keep_last_n_checkpoints never deletes the checkpoint of this iteration."""
        return iteration in self.extra_save_iters or (
            self.checkpoint_scale == "log" and self.saves(iteration)
        )

    def saves(self, iteration: int) -> bool:
        """Whether a checkpoint is due after this number of optimizer steps (besides the one after
        the last step).
        """
        if iteration in self.extra_save_iters:
            return True
        if self.save_interval is None or iteration == 0:
            return False
        if self.checkpoint_scale == "linear":
            return iteration % self.save_interval == 0
        step = 1.0
        while int(step) < iteration:
            step *= self.save_interval
        return int(step) == iteration


class LoggingConfig(ConfigSection):
    """Logging"""

    # The project's own log.
    log_dir: PathText | None = field(
        None,
        "Folder for a copy of the console output and for metrics.jsonl. Default: none.",
        placeholders=True,
    )
    peak_theoretical_tflops: float | None = field(
        None,
        "Peak of the device in TFLOP/s, for the MFU in the log. Default: the dense bf16 peak, if "
        "the GPU is known.",
        gt=0,
    )

    # Other places for the metrics.
    tensorboard_dir: PathText | None = field(
        None, "Folder for TensorBoard. Default: none.", placeholders=True
    )
    use_wandb: bool | None = field(
        None,
        "True: log to Weights & Biases. The API key is read from WANDB_API_KEY, never from a "
        "configuration.",
    )
    wandb_project: str = field("neox", "Weights & Biases: project.")
    wandb_group: str | None = field(None, "Weights & Biases: group of runs.", placeholders=True)
    wandb_team: str | None = field(None, "Weights & Biases: team (entity).")
    wandb_run_name: str | None = field(
        None,
        "Weights & Biases: name of the run. Default: chosen by Weights & Biases.",
        placeholders=True,
    )
    wandb_host: str = field("https://api.wandb.ai", "Weights & Biases: address of the server.")

    # Traces of a few steps.
    profile: bool = field(
        False,
        "True: profile some steps with torch.profiler. Every rank writes a trace to "
        "tensorboard_dir (or log_dir).",
    )
    profile_step_start: Int = field(10, "Number of steps before the first profiled one.", ge=0)
    profile_step_stop: Int = field(
        12, "Number of steps up to and including the last profiled one.", ge=1
    )

    def contradictions(self) -> Iterator[str]:
        if not self.profile:
            return
        if self.profile_step_stop <= self.profile_step_start:
            yield (
                f"profile_step_stop {self.profile_step_stop} must be more than profile_step_start "
                f"{self.profile_step_start}; change one of them"
            )
        if self.tensorboard_dir is None and self.log_dir is None:
            yield (
                "profile writes traces to tensorboard_dir or log_dir, but neither is set; set one "
                "of them"
            )
