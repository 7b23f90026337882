import shutil
import subprocess
from pathlib import Path

import pytest

from megatron.config import Config
from tests.support.layouts import LAYOUTS, VOCABULARY, Trained
from tests.support.ranks import Ranks
from tests.support.runs import trained as run_here
from tests.support.runs import training_settings


@pytest.fixture(scope="session")
def ranks(fork_server) -> Ranks:
    return Ranks(fork_server, 2)


@pytest.fixture(scope="session")
def trained(ranks, data_path) -> Trained:
    from megatron.training.loop import train

    def train_in(folder: Path, layout: str, **keys: object) -> str:
        settings = training_settings(
            folder, data_path, **{"padded_vocab_size": VOCABULARY, **LAYOUTS[layout], **keys}
        )
        if layout != "one":
            return ranks.train(settings)
        train(Config.from_flat(settings))
        return ""

    return train_in


@pytest.fixture(scope="session")
def default_run(tmp_path_factory, data_path) -> Path:
    """The folder of a finished run of one rank with the default keys. Do not write to it."""
    return run_here(tmp_path_factory.mktemp("default"), data_path)


@pytest.fixture
def finished_run(default_run, tmp_path) -> None:
    """A copy of this run in `tmp_path`."""
    shutil.copytree(default_run, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def forked_scripts(fork_server, monkeypatch) -> None:
    """Python scripts that the test starts, and those that they start, are forks of a process that
    has imported their modules. Other tests start the same scripts in new interpreters:
    test_launch_training.py, test_orphans.py.
    """
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)
