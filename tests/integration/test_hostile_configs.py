"""Seeded hostile configurations: each loads or ends in one UserError of limited length, and in little time."""

import time

import pytest

from megatron.config import Config, UserError, load_config
from tests.support.hostile_configs import every_value, mutations
from tests.support.runs import training_settings

MAX_MESSAGE = 20_000  # characters
MAX_SECONDS = 2.0  # of processor time


def load(tmp_path, mutation) -> Config | None:
    path = tmp_path / "hostile.yml"
    path.write_bytes(mutation.content)
    start = time.process_time()
    config, message = None, ""
    try:
        config = load_config([path], overrides=mutation.overrides)
    except UserError as error:
        message = str(error)
    assert len(message) < MAX_MESSAGE, mutation.description
    assert time.process_time() - start < MAX_SECONDS, mutation.description
    return config


def test_mutations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = [load(tmp_path, mutation) for mutation in mutations(training_settings(tmp_path, "data"), 1, 60)]
    assert 3 < sum(config is not None for config in loaded) < 50


def test_the_same_seed_gives_the_same_mutations(tmp_path):
    base = training_settings(tmp_path, "data")
    first, second, other = (list(mutations(base, seed, 20)) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.slow
def test_every_key_with_every_hostile_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for mutation in every_value(training_settings(tmp_path, "data")):
        config = load(tmp_path, mutation)
        if config is not None:
            assert Config.from_flat(config.to_flat()) == config
