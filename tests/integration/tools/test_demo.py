"""`make demo` on a few steps: what it leaves behind, and that it does nothing twice."""

import json

import pytest

from tests.support.runs import ROOT
from tools import demo

LENGTHS = [128, 256, 512, 1024, 2048]


@pytest.fixture
def demonstrate(tmp_path, capfd):
    """Run the demonstration with one method; gives its output, in one line."""

    def run(*options: str) -> str:
        words = ["--output", str(tmp_path / "runs"), "--data", str(tmp_path / "data"), "--methods", "kerple_log"]
        assert demo.main([*words, "--tokens", "2048", *options]) == 0
        return " ".join(capfd.readouterr().out.split())  # lines are wrapped where the folder's name is long

    run.folder = tmp_path / "runs"
    return run


def test_demonstration_reports_and_is_not_repeated(demonstrate):
    output = demonstrate("--iterations", "4")
    assert "iteration 4/4" in output
    report = demonstrate.folder / "report"
    rows = json.loads((report / "extrapolation.json").read_text())["rows"]
    assert [row["length"] for row in rows] == LENGTHS
    keys = {"pos_emb", "mode", "seed", "train_length", "length", "tokens", "loss", "perplexity"}
    for row in rows:
        assert keys <= row.keys()
        assert (row["pos_emb"], row["mode"], row["train_length"], row["tokens"]) == ("kerple_log", "full", 128, 2048)
    assert (report / "extrapolation.md").read_text().count("kerple_log") >= 1
    assert (report / "extrapolation.png").read_bytes()[:4] == b"\x89PNG"

    again = demonstrate("--iterations", "4")
    assert again.count("done before") == 2
    assert "iteration" not in again

    changed = demonstrate("--iterations", "3")
    assert "it is made again" in changed
    assert "iteration 3/3" in changed


def test_demonstration_uses_the_shipped_configuration():
    text = (ROOT / "configs" / "demo.yml").read_text()
    assert '"train-iters": 600' in text
    assert demo._options([]).iterations == 600
