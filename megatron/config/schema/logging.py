"""Keys of logs, TensorBoard, Weights & Biases and the profiler."""

from collections.abc import Iterator

from megatron.config.schema.base import ConfigSection, Int, PathText, field


class LoggingConfig(ConfigSection):
    """Logging"""

    log_dir: PathText | None = field(
        None, "Folder for a copy of the console output and for metrics.jsonl. Default: none.", placeholders=True
    )
    peak_theoretical_tflops: float | None = field(
        None,
        "Peak of the device in TFLOP/s, for the MFU in the log. Default: the dense bf16 peak, if the GPU is known.",
        gt=0,
    )
    tensorboard_dir: PathText | None = field(None, "Folder for TensorBoard. Default: none.", placeholders=True)
    use_wandb: bool | None = field(
        None, "True: log to Weights & Biases. The API key is read from WANDB_API_KEY, never from a configuration."
    )
    wandb_project: str = field("neox", "Weights & Biases: project.")
    wandb_group: str | None = field(None, "Weights & Biases: group of runs.", placeholders=True)
    wandb_team: str | None = field(None, "Weights & Biases: team (entity).")
    wandb_run_name: str | None = field(
        None, "Weights & Biases: name of the run. Default: chosen by Weights & Biases.", placeholders=True
    )
    wandb_host: str = field("https://api.wandb.ai", "Weights & Biases: address of the server.")
    profile: bool = field(
        False,
        """True: profile some steps with torch.profiler. Every rank writes a trace to tensorboard_dir (or log_dir); the
        log lists the operators that take the longest. On a GPU, also for nsys with --capture-range=cudaProfilerApi.""",
    )
    profile_step_start: Int = field(10, "Number of steps before the first profiled one.", ge=0)
    profile_step_stop: Int = field(12, "Number of steps up to and including the last profiled one.", ge=1)

    def contradictions(self) -> Iterator[str]:
        if not self.profile:
            return
        if self.profile_step_stop <= self.profile_step_start:
            yield (
                f"profile_step_stop {self.profile_step_stop} must be more than profile_step_start "
                f"{self.profile_step_start}; change one of them"
            )
        if self.tensorboard_dir is None and self.log_dir is None:
            yield "profile writes traces to tensorboard_dir or log_dir, but neither is set; set one of them"
