from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from tests.support.checkpoints import write_corpus
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def data_path(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Two ranks for all tests of this folder: importing everything costs them more than most trainings."""
    with Ranks(2) as two:
        yield two


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder where Weights & Biases writes its runs: offline, and not that of an earlier test of this process."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    wandb.teardown()
    yield tmp_path / "wandb"
    wandb.teardown()
