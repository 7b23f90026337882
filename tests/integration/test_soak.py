"""A short run of tools/soak.py. docs/reliability.md has the counts of a long one."""

import argparse
import json
import subprocess
import sys

import pytest

from megatron.utils.errors import UserError
from tests.support.outcomes import Outcome
from tests.support.runs import ROOT
from tools import soak
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


class FakePart:
    """Trials of which the second fails."""

    def trial(self, generator, folder, limit):
        folder.mkdir()
        (folder / "input").write_text("hostile")
        failures = ["failed"] if folder.name == "1" else []
        return Outcome("group", count=1, failures=failures, details={"number": generator.random()})


def test_a_killed_soak_test_resumes(tmp_path, monkeypatch):
    """With a journal that is cut at any byte."""
    monkeypatch.setattr(soak, "make_part", lambda *_: FakePart())
    monkeypatch.setattr(soak.forks, "adopt_orphans", lambda: None)
    monkeypatch.setattr(soak.forks, "import_modules", lambda: None)
    options = argparse.Namespace(output=tmp_path, only="", count=3, seed=1)
    header = {"commit": "abc", "seed": 1, "only": ""}
    journal = tmp_path / "files.jsonl"

    def run_again():
        soak.run_part("files", options, header, float("inf"))
        return journal.read_bytes()

    whole = run_again()
    assert whole.count(b"\n") == 4
    for size in range(0, len(whole) + 1, 7):
        journal.write_bytes(whole[:size])
        assert len(soak.read_journal(journal, header)) == max(0, whole[:size].count(b"\n") - 1)
        assert run_again() == whole
    assert [path.name for path in (tmp_path / "failed").iterdir()] == ["files-1"]
    with pytest.raises(UserError, match="has results of seed 1, not 2; choose another --output"):
        soak.read_journal(journal, {**header, "seed": 2})
