"""A short run of tools/soak.py. docs/reliability.md has the counts of a long one."""

import json
import subprocess
import sys

from tests.support.runs import ROOT


def test_no_trial_of_a_short_soak_test_fails(tmp_path):
    """The seed selects training with async save, evaluation and preprocessing. A second call has nothing left to do."""
    command = [sys.executable, str(ROOT / "tools/soak.py"), "kills", "--seed", "184", "--output", str(tmp_path)]
    for count in (6, 1):
        completed = subprocess.run([*command, "--count", str(count)], capture_output=True, text=True, timeout=280)
        assert completed.returncode == 0, completed.stdout + completed.stderr
    outcomes = [json.loads(line) for line in (tmp_path / "kills.jsonl").read_text().splitlines()[1:]]
    assert sum(outcome["count"] for outcome in outcomes) >= 6
    assert "| kills: training, async save |" in completed.stdout
