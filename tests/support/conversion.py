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
                parameter.copy_(drawn * 0.25)
            elif parameter.dim() == 1:
                parameter.copy_(drawn * 0.02 + (1.0 if name.endswith("norm.weight") else 0.0))
            else:  # scalars per head
                parameter.copy_(drawn.abs() * 0.5 + 0.05)
    return model.eval(), config


def random_tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def greedy(model: GPT, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Greedy continuation that recomputes the prefix for every token."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens
