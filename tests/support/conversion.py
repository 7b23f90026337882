"""Small models to convert, whose logits depend strongly on positions."""

import torch

from megatron.config import Config
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from tests.support.checkpoints import TRAIN_LENGTH, VOCABULARY, settings_of

LONG = 4 * TRAIN_LENGTH


def quiet(_: str) -> None:
    """Replaces print."""


def make_model(pos_emb: str, *, seed: int = 0, **keys: object) -> tuple[GPT, Config]:
    """A model with random weights, and its configuration."""
    flat = settings_of(pos_emb, "nowhere", padded_vocab_size=VOCABULARY, **keys)
    config = Config.from_flat(flat)
    model = GPT(ModelSettings(config.model, VOCABULARY))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() in (2, 4):  # of linear layers and convolutions
                values = drawn * 0.25
            elif name.endswith("norm.weight"):
                values = drawn * 0.02 + 1.0
            elif parameter.dim() == 1:
                values = drawn * 0.02
            else:  # scalars per head
                values = drawn.abs() * 0.5 + 0.05
            parameter.copy_(values)
    return model.eval(), config


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def greedy(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy continuation that recomputes the prefix for every token."""
    for _ in range(count):
        logits = model(tokens)[:, -1:]
        tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
    return tokens
