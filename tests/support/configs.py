"""A minimal configuration."""

from megatron.config import Config

MINIMAL = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "pos-emb": "none",
}


def make_config(**keys: object) -> Config:
    return Config.from_flat({**MINIMAL, **keys})
