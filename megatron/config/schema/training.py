"""The training loop: intervals, memory, and where its numbers go."""

from typing import Any

from megatron.config.schema.base import Group, Int, Ints, key

EXTRAPOLATION_TOKENS = 65_536


class TrainingConfig(Group):
    """Training"""

    seed: Int = key(1234, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)
    eval_interval: Int = key(1000, "Optimizer steps between validations.", ge=1)
    eval_iters: Int = key(100, "Batches per validation. 0: no validation.", ge=0)
    seq_length_val: Int | None = key(None, "Validation length, in tokens. Default: seq_length.", ge=1)
    extrapolation_lengths: Ints | None = key(
        None,
        """Lengths, in tokens, at which the loss of the validation text is measured at every eval_interval, a curve for
        each. Default: none. Not with a pipeline, tensor parallelism or ZeRO 3.""",
        min_length=1,
    )
    extrapolation_tokens: Int | None = key(
        None,
        f"""Tokens of the validation text to score for that, the same ones at every length. Default:
        {EXTRAPOLATION_TOKENS:,}, or one segment of the longest length.""",
        ge=1,
    )
    log_interval: Int = key(100, "Optimizer steps between two lines of the log.", ge=1)
    checkpoint_activations: bool = key(
        False, "True: activations inside the blocks are computed again in the backward pass, to save memory."
    )
    checkpoint_num_layers: Int = key(1, "Blocks per checkpointed chunk.", ge=1)
    torch_compile: bool = key(
        False,
        """True: train with blocks that torch.compile has compiled, but for attention. This takes a C++ compiler, on a
        GPU Triton too, and up to a minute at the start. Not with a pipeline, tensor parallelism or ZeRO 3.""",
    )
    exit_interval: Int | None = key(None, "Save and exit after a step divisible by this.", ge=1)
    steps_per_print: Int = key(10, "Optimizer steps between DeepSpeed's own progress lines.", ge=1)
    wall_clock_breakdown: bool = key(False, "True: log the time of forward, backward and optimizer.")
    deepspeed_extra_args: dict[str, Any] = key(
        {}, "Further keys of DeepSpeed's configuration, handed over as they are; those set from other keys are refused."
    )

    @property
    def extrapolation_budget(self) -> int:
        """The most tokens to score at each of `extrapolation_lengths`."""
        return self.extrapolation_tokens or max(EXTRAPOLATION_TOKENS, *self.extrapolation_lengths)


class LoggingConfig(Group):
    """Logging"""

    log_dir: str | None = key(None, "Folder for a copy of the console's output. Default: none.", placeholders=True)
    tensorboard_dir: str | None = key(None, "Folder for TensorBoard. Default: none.", placeholders=True)
    use_wandb: bool | None = key(
        None, "True: log to Weights & Biases; its key is read from WANDB_API_KEY, never from a configuration."
    )
    wandb_project: str = key("neox", "Project in Weights & Biases.")
    wandb_group: str | None = key(None, "Group of runs in Weights & Biases.", placeholders=True)
    wandb_team: str | None = key(None, "Team (entity) in Weights & Biases.")
    wandb_run_name: str | None = key(
        None, "Name of the run in Weights & Biases. Default: chosen by it.", placeholders=True
    )
    wandb_host: str = key("https://api.wandb.ai", "Address of the Weights & Biases server.")
