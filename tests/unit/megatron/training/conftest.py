from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.simulated_ranks import as_rank  # noqa: F401 (a fixture)


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder of Weights & Biases' offline runs, new for this test."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb.teardown()
    yield tmp_path / "wandb"
    wandb.teardown()
