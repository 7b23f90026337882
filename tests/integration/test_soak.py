"""A short run of tools/soak.py. docs/reliability.md has the counts of a long one."""

import json
import subprocess
import sys

import pytest

from tests.support.runs import ROOT
from tools.soak import COUNTS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The output folder of two calls, the second of which has nothing left to do. The seed selects training with async
    save.
    """
    output = tmp_path_factory.mktemp("soak")
    command = [sys.executable, str(ROOT / "tools/soak.py"), "--seed", "184", "--count", "5"]
    for _ in range(2):
        completed = subprocess.run(
            [*command, "--output", str(output)], capture_output=True, text=True, timeout=280, check=False
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
    return output


@pytest.mark.slow
@pytest.mark.parametrize("part", COUNTS)
def test_no_trial_fails(results, part):
    header, *lines = (results / f"{part}.jsonl").read_text().splitlines()
    assert json.loads(header)["seed"] == 184
    assert sum(json.loads(line)["count"] for line in lines) == 5
    row = json.loads((results / "soak.json").read_text())["parts"][part]
    assert {row[name] for name in ("tracebacks", "losses", "orphans", "other failures")} == {"0"}
