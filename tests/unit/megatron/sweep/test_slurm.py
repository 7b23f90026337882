"""The job array script; tests/integration/test_multi_host.py runs one."""

import pytest

from megatron.config import UserError
from tests.support.runs import ROOT


def test_script_of_a_sweep(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sweep.sh"
    output = sweep("--only", "al*", "--write-slurm", str(path), "--slurm-tasks=3", "--slurm-options=--time=1:00")
    assert f"sbatch {path}" in output
    lines = path.read_text().splitlines()
    assert {"#SBATCH --array=1-3", f"#SBATCH --chdir={tmp_path}", "#SBATCH --time=1:00"} < set(lines)
    (command,) = [line for line in lines if line.endswith(" &")]
    assert command.endswith(f"{ROOT}/kerple_command.py sweep {tmp_path}/sweep.yml --only 'al*' &")
    assert not sweep.runs.exists()


def test_percent_signs_in_the_path_of_the_log_are_not_patterns(sweep, tmp_path):
    sweep("--write-slurm", str(tmp_path / "sweep.sh"), output=str(tmp_path / "50%j"))
    assert f"#SBATCH --output={tmp_path}/50%%j/slurm-%A_%a.log" in (tmp_path / "sweep.sh").read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm-options=gpu"], "--slurm-options gpu.*--NAME=VALUE"),
        (["--slurm-options=--a='"], "--slurm-options --a='"),
    ],
)
def test_invalid_options(words, message, sweep, tmp_path):
    with pytest.raises(UserError, match=message):
        sweep("--write-slurm", str(tmp_path / "sweep.sh"), *words)
    assert not (tmp_path / "sweep.sh").exists()
