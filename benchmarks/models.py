"""Our model, as a run begins with it."""

from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.settings import ModelSettings


def our_model(settings: ModelSettings, *, checkpoint_every: int = 0) -> GPT:
    """A GPT with the recipe's initial weights; arguments as of `GPT`."""
    model = GPT(settings, checkpoint_every=checkpoint_every)
    initialize(model.layers(), settings, seed=1234, init_method="normal", output_init_method="scaled_normal", std=0.02)
    return model
