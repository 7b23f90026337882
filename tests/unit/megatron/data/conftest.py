"""Configurations for the tests of megatron.data."""

import json

import pytest

from megatron.config import load_config
from megatron.data.datasets import SampleSettings
from tests.support.simulated_ranks import as_rank
from tests.support.token_files import (
    VOCABULARY,
    corpus,
    documents,
    no_fsync,
    tokenizer,
    tokenizer_file,
    write_corpus,
)

__all__ = [
    "as_rank",
    "corpus",
    "documents",
    "no_fsync",
    "tokenizer",
    "tokenizer_file",
    "write_corpus",
]


@pytest.fixture
def settings() -> SampleSettings:
    return SampleSettings(VOCABULARY, 0, 1234)


@pytest.fixture
def configuration(tmp_path):
    """load(**keys) returns a small configuration with these keys."""

    def load(**keys):
        model = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32}
        training = {
            "max_position_embeddings": 32,
            "train_micro_batch_size_per_gpu": 2,
            "train_iters": 3,
            "seed": 1234,
        }
        (tmp_path / "configuration.yml").write_text(json.dumps(model | training | keys))
        return load_config([str(tmp_path / "configuration.yml")])

    return load
