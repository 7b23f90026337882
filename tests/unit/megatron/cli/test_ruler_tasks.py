"""tools/datasets/ruler_tasks.py, and evaluate.py on the tasks that it writes."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron.cli.evaluate import main as evaluate
from megatron.cli.ruler_tasks import main
from megatron.evaluation.harness import HarnessModel
from megatron.utils.errors import UserError
from tests.support.harness_tasks import use_offline_harness, write_ascii_checkpoint

SCRIPT = Path(__file__).parents[4] / "tools/datasets/ruler_tasks.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kerple_log")
    write_ascii_checkpoint(folder, "kerple_log")
    return str(folder)


def test_written_tasks_are_run_by_evaluate(checkpoint, tmp_path, monkeypatch, capsys):
    use_offline_harness(monkeypatch, tmp_path / "datasets")
    folder = tmp_path / "my tasks"
    words = ["--checkpoint", checkpoint, "--lengths", "600", "900", "--samples", "3", "--output", str(folder)]
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words, "--tasks", "niah_single", "variable_tracking"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert not end.value.code
    assert "4 tasks with 3 prompts each" in capsys.readouterr().out
    names = [f"ruler_{name}_{length}" for name in ("niah_single", "variable_tracking") for length in (600, 900)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{suffix}" for name in names for suffix in ("jsonl", "yaml")
    )
    run = ["--checkpoint", checkpoint, "--include-path", str(folder), "--output", str(tmp_path / "results")]
    evaluate([*run, "--eval-tasks", "ruler_niah_single_600", "--limit", "1"])  # generates
    assert 480 < results(tmp_path)["lengths"]["generate_until"]["longest"] <= 600
    assert results(tmp_path)["lengths"]["generate_until"]["cut"] == 0

    def answer(self, requests, disable_tqdm=False):
        """The number of the needle; two of the five variables."""
        prompts = [request.args[0] for request in requests]
        return [" " + " ".join(re.findall(r"is (\d{7})\.|VAR (\w+) = (?=\d|VAR)", text)[0]) for text in prompts]

    monkeypatch.setattr(HarnessModel, "generate_until", answer)
    evaluate([*run, "--eval-tasks", "ruler_local"])
    scores = {name: values["string_match,none"] for name, values in results(tmp_path)["results"].items()}
    assert scores == {name: 1.0 if "single" in name else pytest.approx(0.2) for name in names}
    assert "string_match" in capsys.readouterr().out


def results(folder):
    *_, checkpoint = json.loads((folder / "results/tasks.json").read_text())["checkpoints"]
    return checkpoint


def test_errors(checkpoint, tmp_path, capsys):
    with pytest.raises(UserError, match="--lengths 64: niah_single takes at least"):
        main(["--checkpoint", checkpoint, "--lengths", "64", "--output", str(tmp_path)])
    # Nothing is written for the tasks before it.
    with pytest.raises(UserError, match="--lengths 420: niah_multiquery takes at least"):
        main(["--checkpoint", checkpoint, "--lengths", "900", "420", "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output: cannot write to"):
        main(["--checkpoint", checkpoint, "--output", str(tmp_path / "file" / "x")])
    with pytest.raises(SystemExit):
        main(["--checkpoint", checkpoint, "--output", str(tmp_path), "--tasks", "cwe"])
    assert "invalid choice: 'cwe'" in capsys.readouterr().err
