"""A sweep whose trainings and evaluations are stand-ins that take no time, beside the real files."""

import json
from pathlib import Path

import pytest

from megatron.cli import sweep as command
from tests.support.sweeps import write_sweep

DEEPY = """
import json, os, pathlib, sys, time
assert pathlib.Path(sys.argv[1]).name == "train.py"
config = json.loads(pathlib.Path(sys.argv[2]).read_text())
folder, log = pathlib.Path(config["save"]), pathlib.Path(config["log_dir"])
start = int((folder / "latest").read_text()[11:]) if (folder / "latest").is_file() else 0
print(f"training from {start}, GPU {os.environ.get('CUDA_VISIBLE_DEVICES')}")
log.mkdir(parents=True, exist_ok=True)
if config["seed"] == 13:
    print("a first line\\nthe loss is not finite", file=sys.stderr)
    sys.exit(3)
steps = config["train_iters"]
end = steps // 2 if config["seed"] == 17 and start == 0 else steps
with open(log / "metrics.jsonl", "a") as stream:
    for step in range(start + 1, end + 1):
        line = {"iteration": step, "train/tokens": step * 256.0, "train/tokens_per_second": 512.0}
        stream.write(json.dumps(line) + "\\n")
(folder / f"global_step{end}" / "configs").mkdir(parents=True)
(folder / f"global_step{end}" / "configs" / "config.yml").write_text(json.dumps(config))
(folder / "latest").write_text(f"global_step{end}")
sys.exit(0 if end == steps else 9)
"""

EVALUATE = """
import json, pathlib, sys
config = json.loads(pathlib.Path(sys.argv[1]).read_text())
words = sys.argv[2:]
output = pathlib.Path(words[words.index("--output") + 1])
print("evaluating", *words)
if config["seed"] == 19:
    sys.exit("no such text")
output.mkdir(parents=True, exist_ok=True)
row = {"kind": "extrapolation", "corpus": "text", "pos_emb": config["pos_emb"], "mode": "full", "seed": config["seed"],
       "train_length": 32, "protocol": "non-overlapping", "tokens": 128, "loss": 1.0, "note": None,
       "checkpoint": {"path": config["save"], "iteration": config["train_iters"]}}
rows = [{**row, "length": length, "perplexity": 2.7 + config["seed"] / 100} for length in (32, 64)]
(output / "results.jsonl").write_text("".join(json.dumps(one) + "\\n" for one in rows))
"""


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """`sweep(*options, status=0, **keys)` writes and runs a sweep with stand-ins, and gives what it printed. The report
    is left out, which takes a second, unless `run.reports` is set.
    """
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("megatron.sweep.runner.PAUSE", 0.02)
    written = command.write_paper_report

    def report(sources, output, title):
        return written(sources, output, title) if run.reports else output / "left out"

    monkeypatch.setattr(command, "write_paper_report", report)
    root = tmp_path / "stand-ins"
    root.mkdir()
    (root / "deepy.py").write_text(DEEPY)
    (root / "train.py").write_text("")
    (root / "evaluate.py").write_text(EVALUATE)

    def run(*options: str, status: int = 0, write: bool = True, **keys: object) -> str:
        path = write_sweep(tmp_path, **keys) if write else tmp_path / "sweep.yml"
        assert command.main(root, [str(path), *options]) == status
        return capsys.readouterr().out

    run.runs = tmp_path / "out" / "runs"
    run.report = tmp_path / "out" / "report"
    run.folder = tmp_path
    run.reports = False
    return run


def outputs(folder: Path) -> list[str]:
    """What the processes of a run printed, all of them."""
    return (folder / "output.log").read_text().splitlines()


def logged(folder: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (folder / "logs" / "metrics.jsonl").read_text().splitlines()]
