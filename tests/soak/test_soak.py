"""Short runs of the soak test. docs/reliability.md has the counts of a long one."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from megatron.config import Config, UserError, load_config
from megatron.config.loader import FIELDS
from tests.soak.cases import Cases, Outcome, remove
from tests.soak.configs import VALUES, configs, with_values
from tests.soak.files import GROUPS
from tests.soak.kills import Kills
from tests.support.runs import ROOT, training_settings


def soak(output, start, *words):
    """The trials of a call of the soak test, which must not find anything."""
    command = [sys.executable, str(ROOT / "tests/soak/__main__.py"), *words, "--output", str(output)]
    process = start(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    trials = [json.loads(line) for line in (output / "trials.jsonl").read_text().splitlines()]
    assert f"| **{words[0]}** | **{len(trials)}** |" in text
    return trials


@pytest.mark.parametrize("part", ["configs", "files"])
def test_no_input_fails(tmp_path, fork_server, part):
    trials = soak(tmp_path, fork_server.Popen, part, "--count", "4")
    assert [trial["index"] for trial in trials] == list(range(4))


def test_no_kill_loses_anything(tmp_path, fork_server):
    trials = soak(tmp_path, fork_server.Popen, "kills", "--count", "2", "--only", "training, workers, validation")
    assert sum(trial["count"] for trial in trials) == 2


@pytest.mark.slow
@pytest.mark.parametrize("only", ["ZeRO 3", "training, async save", "preprocessing", "evaluation"])
def test_no_kill_of_other_commands_loses_anything(tmp_path, only):
    trials = soak(tmp_path, subprocess.Popen, "kills", "--count", "4", "--only", only)
    assert all(only in trial["group"] for trial in trials)


def test_kills_cover_workers_validation_and_every_zero_stage(tmp_path):
    settings = []
    for name, (_, command) in Kills(tmp_path, "training, ").commands.items():
        (tmp_path / name).mkdir()
        command.prepare(tmp_path / name)
        settings.append(json.loads((tmp_path / name / "config.yml").read_text()))
    chosen = [keys for keys in settings if keys["num_workers"] and keys["eval_iters"]]
    assert all(keys["log_interval"] > 1 and keys["save_interval"] <= keys["eval_interval"] for keys in chosen)
    assert {keys.get("zero_optimization", {}).get("stage") for keys in chosen} == {None, 0, 1, 2, 3}


@pytest.mark.parametrize("group", [group for group in GROUPS if group.startswith("checkpoint")])
def test_a_seed_gives_the_same_input(group, tmp_path):
    def content(seed):
        with contextlib.ExitStack() as resources:
            case = Cases(GROUPS, group).draw(seed, tmp_path / "case", resources)[1]
        files = [path for path in sorted((tmp_path / "case").rglob("*")) if path.is_file() and not path.is_symlink()]
        found = case.command, [path.read_bytes() for path in files]
        remove(tmp_path / "case")
        return found

    first = content("1")
    assert content("1")[0] == first[0]
    assert any(content(seed) != first for seed in "234")


def test_outcomes():
    assert Outcome("group", memory_ratio=1.0).is_good
    for bad in ({"tracebacks": 1}, {"losses": ["a"]}, {"orphans": 1}, {"failures": ["a"]}, {"memory_ratio": 1.1}):
        assert not Outcome("group", **bad).is_good


BASE = training_settings(Path("runs"), "data")
MAX_MESSAGE = 20_000  # characters
MAX_SECONDS = 2.0  # of processor time


def load(hostile) -> Config | None:
    """The configuration; None if it was rejected with an error of limited length."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hostile.yml")
        path.write_bytes(hostile.content)
        start = time.process_time()
        config, message = None, "loaded"
        try:
            config = load_config([path], overrides=hostile.overrides)
        except UserError as error:
            message = str(error)
        assert 0 < len(message) < MAX_MESSAGE
        assert time.process_time() - start < MAX_SECONDS
    return config


def test_configurations_load_or_are_rejected():
    loaded = []

    @settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=HealthCheck)
    @given(configs(BASE))
    def check(hostile):
        loaded.append(load(hostile) is not None)

    check()
    assert 3 < sum(loaded) < 50


@pytest.mark.slow
def test_every_key_with_every_hostile_value():
    for path in FIELDS:
        for value in VALUES:
            config = load(with_values(BASE, {path: value}))
            if config is not None:
                assert Config.from_flat(config.to_flat()) == config
