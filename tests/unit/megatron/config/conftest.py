"""A small valid configuration, as a user would write it."""

from pathlib import Path

import pytest

from tests.support.configs import MINIMAL

ROOT = Path(__file__).parents[4]


@pytest.fixture
def flat() -> dict:
    """A minimal configuration, with a batch size."""
    return {**MINIMAL, "pos-emb": "kerple_log", "train_micro_batch_size_per_gpu": 2}


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> path of a file with that text (or bytes)."""

    def make(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make
