"""`make demo` with a few iterations: its results, and that finished steps are skipped."""

import json

import pytest

from tests.support.runs import ROOT
from tools import demo

LENGTHS = [128, 256, 512, 1024, 2048]


@pytest.fixture
def run_demo(tmp_path, capfd):
    """Run the demo with one method; returns its output as one line."""

    def run(*options: str) -> str:
        arguments = ["--output", str(tmp_path / "runs"), "--data", str(tmp_path / "data"), "--methods", "kerple_log"]
        assert demo.main([*arguments, "--tokens", "2048", *options]) == 0
        return " ".join(capfd.readouterr().out.split())  # joins wrapped lines

    run.folder = tmp_path / "runs"
    return run


def test_the_demo_writes_a_report_and_skips_finished_steps(run_demo, monkeypatch):
    output = run_demo("--iterations", "4")
    assert "iteration 4/4" in output
    report = run_demo.folder / "report"
    rows = json.loads((report / "extrapolation.json").read_text())["rows"]
    assert [row["length"] for row in rows] == LENGTHS
    keys = {"pos_emb", "mode", "seed", "train_length", "length", "tokens", "loss", "perplexity"}
    for row in rows:
        assert keys <= row.keys()
        assert (row["pos_emb"], row["mode"], row["train_length"], row["tokens"]) == ("kerple_log", "full", 128, 2048)
    assert (report / "extrapolation.md").read_text().count("kerple_log") >= 1
    assert (report / "extrapolation.png").read_bytes()[:4] == b"\x89PNG"

    commands = []
    monkeypatch.setattr(demo, "run_step", lambda title, command: commands.append(command[0]) or 0)
    assert run_demo("--iterations", "4").count("already done") == 2
    assert commands == ["prepare_data.py"]  # which skips a finished corpus itself
    assert "training again" in run_demo("--iterations", "3")
    assert commands[1:] == ["prepare_data.py", "deepy.py", "evaluate.py"]
    assert not (run_demo.folder / "kerple_log" / "checkpoints").exists()


def test_the_demo_uses_the_iterations_of_its_configuration():
    text = (ROOT / "configs" / "demo.yml").read_text()
    assert '"train-iters": 600' in text
    assert demo.parse_options([]).iterations == 600
