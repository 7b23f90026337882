"""`make demo`: corpus, tokenizer, three small models, and how they extrapolate. Steps that are done are not done again.

python tools/demo.py [--output runs/demo] [--methods kerple_log alibi rotary] [--iterations 600]
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.rule import Rule  # noqa: E402

import check_megatron  # noqa: E402, F401
from megatron.config.command_line import OptionParser  # noqa: E402
from megatron.utils.files import write_atomically  # noqa: E402

METHODS = ("kerple_log", "alibi", "rotary")
LENGTHS = ("128", "256", "512", "1024", "2048")
CORPUS = "python_stdlib"
# Beside a result: what it was made from. Another corpus, tokenizer or configuration makes another result.
STAMP = "made_from.json"

console = Console()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing of the demonstration; returns the exit status of the step that failed, or 0."""
    options = _options(argv)
    started = time.perf_counter()
    # prepare_data.py itself sees whether its result is there, whole, and made as asked.
    status = _run("corpus and tokenizer, from this Python's standard library", _prepare_command(options.data))
    for method in options.methods:
        status = status or _train(method, options)
    status = status or _evaluate(options)
    if status:
        console.print("[red]stopped[/]; the same command goes on from here")
        return status
    _show(options.output / "report" / "extrapolation.json")
    console.print(f"the whole took {time.perf_counter() - started:.0f} s; report: {options.output / 'report'}")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description="Train three small models on short texts and test them on long ones.")
    parser.add_argument("--output", type=_path, default=_path("runs/demo"), help="folder of the runs and the report")
    parser.add_argument("--data", type=_path, default=_path("data"), help="folder of the corpus")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="positional methods (pos-emb)")
    parser.add_argument("--iterations", type=int, default=600, help="optimizer steps of each model (%(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=131_072, help="tokens to score, the same at every length (%(default)s)"
    )
    return parser.parse_args(argv)


def _path(text: str) -> Path:
    """Relative to the project's folder, where the steps run."""
    return ROOT / text


def _run(title: str, command: list[str]) -> int:
    console.print(Rule(title, align="left"))
    return subprocess.run([sys.executable, *command], cwd=ROOT).returncode


def _prepare_command(data: Path) -> list[str]:
    return ["prepare_data.py", "-d", str(data), CORPUS]


def _train(method: str, options: argparse.Namespace) -> int:
    title = f"train {method} at length 128"
    folder, corpus = options.output / method, options.data / CORPUS
    checkpoints = folder / "checkpoints"
    stamp = _training_stamp(method, options)
    if checkpoints.exists() and _stamp_of(folder) != stamp:
        console.print(f"{folder} was made from another corpus, tokenizer or configuration: it is made again")
        shutil.rmtree(folder)
    latest = checkpoints / "latest"
    if latest.is_file() and latest.read_text().strip() == f"global_step{options.iterations}":
        console.print(f"[green]done before:[/] {title}")
        return 0
    _write_stamp(folder, stamp)
    settings = {
        "train-iters": options.iterations,
        "lr-decay-iters": options.iterations,
        "save": checkpoints,
        "load": checkpoints,
        "log-dir": folder / "logs",
        "data-path": corpus / f"{CORPUS}_text_document",
        "vocab-file": corpus / "tokenizer.json",
    }
    command = ["deepy.py", "train.py", "-d", "configs", "demo.yml", f"pos_emb/{method}.yml", "--set"]
    return _run(title, [*command, *(f"{key}={value}" for key, value in settings.items())])


def _evaluate(options: argparse.Namespace) -> int:
    title, report = f"evaluate at {LENGTHS[0]} ... {LENGTHS[-1]} tokens", options.output / "report"
    stamp = {
        "models": {method: _training_stamp(method, options) for method in options.methods},
        "lengths": list(LENGTHS),
        "tokens": options.tokens,
    }
    if (report / "extrapolation.json").is_file() and _stamp_of(report) == stamp:
        console.print(f"[green]done before:[/] {title}")
        return 0
    folders = [str(options.output / method / "checkpoints") for method in options.methods]
    command = ["evaluate.py", "--checkpoint", *folders, "--lengths", *LENGTHS, "--tokens", str(options.tokens)]
    heading = "Trained at length 128, tested beyond it"
    status = _run(title, [*command, "--output", str(report), "--replace", "--title", heading])
    if status == 0:
        _write_stamp(report, stamp)
    return status


def _training_stamp(method: str, options: argparse.Namespace) -> dict[str, object]:
    corpus = options.data / CORPUS
    files = {
        "corpus": corpus / f"{CORPUS}_text_document.idx",
        "tokenizer": corpus / "tokenizer.json",
        "configuration": ROOT / "configs" / "demo.yml",
        "method": ROOT / "configs" / "pos_emb" / f"{method}.yml",
    }
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return {**digests, "iterations": options.iterations}


def _stamp_of(folder: Path) -> object:
    """What the folder was made from; None if there is no telling."""
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _write_stamp(folder: Path, stamp: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / STAMP, (json.dumps(stamp, indent=2) + "\n").encode())


def _show(report: Path) -> None:
    """In a sentence, what the report says of each method."""
    rows = json.loads(report.read_text())["rows"]
    for method in dict.fromkeys(row["pos_emb"] for row in rows):
        by_length = {row["length"]: row["perplexity"] for row in rows if row["pos_emb"] == method}
        short, long = min(by_length), max(by_length)
        ratio = by_length[long] / by_length[short]
        verdict = "holds" if ratio <= 1.0 else f"is {ratio:.2f} times as high"
        console.print(
            f"{method}: perplexity {by_length[short]:.1f} at {short}, {by_length[long]:.1f} at {long}: it {verdict}"
        )


if __name__ == "__main__":
    sys.exit(main())
