import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config import Config
from tests.support.checkpoints import write_corpus
from tests.support.layouts import LAYOUTS, VOCABULARY, Trained
from tests.support.ranks import Ranks
from tests.support.runs import training_settings


@pytest.fixture(scope="session")
def data_path(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two rank processes, shared by all tests: their imports take longer than most trainings."""
    with Ranks(2) as two_ranks:
        yield two_ranks


@pytest.fixture(scope="session")
def trained(ranks, data_path) -> Trained:
    from megatron.training.loop import train

    def train_in(folder: Path, layout: str, **keys: object) -> str:
        settings = training_settings(folder, data_path, **{"padded_vocab_size": VOCABULARY, **LAYOUTS[layout], **keys})
        if layout != "one":
            return ranks.train(settings)
        train(Config.from_flat(settings))
        return ""

    return train_in


@pytest.fixture
def forked_scripts(fork_server, monkeypatch) -> None:
    """Python scripts that the test starts, and those that they start, are forks of a process that has imported their
    modules. Other tests start the same scripts in new interpreters: test_readme.py, test_launch_training.py,
    test_orphans.py.
    """
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)
