"""Short runs of the soak test. docs/reliability.md has the counts of a long one."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from megatron.config import Config, UserError, load_config
from megatron.config.schema import FIELDS
from tests.soak.cases import PROBLEMS, Outcome, draw_case
from tests.soak.configs import VALUES, configs, with_values
from tests.soak.files import GROUPS
from tests.soak.kills import commands
from tests.support.runs import ROOT, training_settings

LONG = ("ZeRO 3", "preprocessing", "evaluation")
TRIALS = [("configs", 4, ""), ("files", 4, ""), ("kills", 1, "training, workers, validation")]
TRIALS += [pytest.param("kills", 4, only, marks=pytest.mark.slow) for only in LONG]


@pytest.mark.ci
@pytest.mark.parametrize(("part", "count", "only"), TRIALS)
def test_no_trial_fails(tmp_path, fork_server, part, count, only):
    command = [
        sys.executable,
        str(ROOT / "tests/soak/__main__.py"),
        part,
        "--count",
        str(count),
        "--only",
        only,
    ]
    command += ["--output", str(tmp_path)]
    process = fork_server.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert f"| **{part}** | **{len(trials)}** |" in text
    assert sum(trial["count"] for trial in trials) == count
    assert all(only in trial["group"] for trial in trials)


def test_kills_cover_workers_validation_and_every_zero_stage(tmp_path):
    settings = []
    for name, command in commands().items():
        if name.startswith("training"):
            (tmp_path / name).mkdir()
            command.prepare(tmp_path / name)
            settings.append(json.loads((tmp_path / name / "config.yml").read_text()))
    chosen = [keys for keys in settings if keys["num_workers"] and keys["eval_iters"]]
    assert all(
        keys["log_interval"] > 1 and keys["save_interval"] <= keys["eval_interval"]
        for keys in chosen
    )
    assert {keys.get("zero_optimization", {}).get("stage") for keys in chosen} == {None, 0, 1, 2, 3}


def test_a_seed_gives_the_same_input(tmp_path):
    def content(seed):
        case = draw_case(GROUPS["checkpoint: configuration"], seed, tmp_path / "case")
        files = [path for path in sorted((tmp_path / "case").rglob("*")) if path.is_file()]
        return case.command, [path.read_bytes() for path in files]

    first = content("1")
    assert content("1")[0] == first[0]
    assert any(content(seed) != first for seed in "234")


def test_outcomes():
    assert Outcome("group", peak=1, memory_limit=1).is_good
    assert not Outcome("group", peak=2, memory_limit=1).is_good
    for kind in PROBLEMS:
        assert not Outcome("group", problems={kind: ["a"]}).is_good


BASE = training_settings(Path("runs"), "data")
MAX_MESSAGE = 20_000  # characters
MAX_SECONDS = 2.0  # of processor time


def load(wrong, path) -> Config | None:
    """The configuration; None if it was rejected with an error of limited length."""
    path.write_bytes(wrong.content)
    start = time.process_time()
    try:
        config, message = load_config([path], overrides=wrong.overrides), "loaded"
    except UserError as error:
        config, message = None, str(error)
    assert 0 < len(message) < MAX_MESSAGE
    assert time.process_time() - start < MAX_SECONDS
    return config


def test_configurations_load_or_are_rejected(tmp_path):
    loaded = []

    @settings(
        max_examples=60,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=HealthCheck,
    )
    @given(configs(BASE))
    def check(wrong):
        loaded.append(load(wrong, tmp_path / "wrong.yml") is not None)

    check()
    assert 3 < sum(loaded) < 50


@pytest.mark.slow
def test_every_key_with_wrong_value(tmp_path):
    for path in FIELDS:
        for value in VALUES:
            config = load(with_values(BASE, {path: value}), tmp_path / "wrong.yml")
            if config is not None:
                assert Config.from_flat(config.to_flat()) == config
