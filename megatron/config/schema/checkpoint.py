"""Saving and loading."""

from megatron.config.schema.base import Group, Int, key


class CheckpointConfig(Group):
    """Checkpoint"""

    save: str | None = key(None, "Folder to save checkpoints to. Default: nothing is saved.", placeholders=True)
    load: str | None = key(
        None,
        "Folder of the checkpoint to start from; a folder that holds none yet means: start anew, and say so.",
        placeholders=True,
    )
    save_interval: Int | None = key(
        None,
        "Optimizer steps between checkpoints; the last step is always saved.",
        aliases=("checkpoint_factor",),
        ge=1,
    )
    keep_last_n_checkpoints: Int | None = key(
        None, "Older checkpoints than these are deleted. Default: all stay.", ge=1
    )
    finetune: bool = key(
        False, "Load the weights only: a new optimizer, and training starts at step 0. The checkpoint must exist."
    )
    no_load_optim: bool = key(False, "Do not load the optimizer's state.")
    no_load_rng: bool = key(False, "Do not load the states of the random generators.")
    no_save_optim: bool = key(False, "Do not save the optimizer's state; training cannot be resumed exactly.")
    no_save_rng: bool = key(False, "Do not save the states of the random generators.")
    checkpoint_validation_with_forward_pass: bool = key(
        False, "Save a batch and its logits with the checkpoint, and compare them after loading."
    )
    async_save: bool = key(
        False,
        """Write checkpoints in the background: training waits for the copy to the host's memory alone, and that memory
        must hold a copy of weights and optimizer.""",
    )
    fallback: bool = key(
        False,
        """When the checkpoint to load is damaged, take the newest whole one beside it. Also given as --fallback.""",
    )
    iteration: Int | None = key(None, "Step of the checkpoint to load. Default: the one named in `latest`.", ge=0)
