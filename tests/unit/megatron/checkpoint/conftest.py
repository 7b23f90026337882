"""A trained run whose checkpoint has files of all kinds, shared by the tests of this folder."""

import pytest

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import training_settings


def full_settings(folder, data_path, **keys):
    return training_settings(
        folder, data_path, **{"train_iters": 2, "save_interval": 1, "eval_iters": 0, **keys}
    )


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, data_path):
    """The folder of a run of two steps with checkpoints of both. Do not write to it."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", "wandb-secret-value")
        config = Config.from_flat(full_settings(folder, data_path))
        # Not accepted from users.
        config._flat["csv_monitor"] = {"enabled": False, "api_key": "other-secret-value"}
        train(config)
    return folder


@pytest.fixture
def resume(tmp_path, data_path):
    """Train one more step from a copy of the run in `tmp_path`."""

    def run(**keys):
        return train(
            Config.from_flat(full_settings(tmp_path, data_path, **{"train_iters": 3, **keys}))
        )

    return run
