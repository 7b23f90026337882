"""`make demo`: corpus, tokenizer, three small models, and how they extrapolate. Steps that are done are not done again.

python tools/demo.py [--output runs/demo] [--methods kerple_log alibi rotary] [--iterations 600]
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.rule import Rule  # noqa: E402

METHODS = ("kerple_log", "alibi", "rotary")
LENGTHS = ("128", "256", "512", "1024", "2048")
# The same tokens at every length: 64 segments of the longest.
TOKENS = "131072"

console = Console()


def main() -> int:
    """Run what is missing of the demonstration; returns the exit status of the step that failed, or 0."""
    options = _options()
    started = time.perf_counter()
    output, data = Path(options.output), Path(options.data)
    steps = [_prepare(data)]
    steps += [_train(method, output, data, options.iterations) for method in options.methods]
    steps.append(_evaluate(options.methods, output))
    for title, done, command in steps:
        if done:
            console.print(f"[green]done before[/] {title}")
            continue
        console.print(Rule(title, align="left"))
        status = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        if status:
            console.print(f"[red]stopped[/] at: {title}. Run the same command again to go on from here.")
            return status
    _show(output / "report")
    console.print(f"the whole took {time.perf_counter() - started:.0f} s; report: {output / 'report'}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train three small models on short texts and test them on long ones.")
    parser.add_argument("--output", default="runs/demo", help="folder of the runs and the report (%(default)s)")
    parser.add_argument("--data", default="data", help="folder of the corpus (%(default)s)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="positional methods (pos-emb)")
    parser.add_argument("--iterations", type=int, default=600, help="optimizer steps of each model (%(default)s)")
    return parser.parse_args()


Step = tuple[str, bool, list[str]]


def _prepare(data: Path) -> Step:
    # prepare_data.py itself sees whether its result is there and whole.
    return (
        "corpus and tokenizer, from this Python's standard library",
        False,
        ["prepare_data.py", "-d", str(data), "python_stdlib"],
    )


def _train(method: str, output: Path, data: Path, iterations: int) -> Step:
    checkpoints = output / method / "checkpoints"
    latest = checkpoints / "latest"
    done = latest.is_file() and latest.read_text().strip() == f"global_step{iterations}"
    settings = {
        "train-iters": iterations,
        "lr-decay-iters": iterations,
        "save": checkpoints,
        "load": checkpoints,
        "log-dir": output / method / "logs",
        "data-path": data / "python_stdlib" / "python_stdlib_text_document",
        "vocab-file": data / "python_stdlib" / "tokenizer.json",
    }
    command = ["deepy.py", "train.py", "-d", "configs", "demo.yml", f"pos_emb/{method}.yml", "--set"]
    return f"train {method} at length 128", done, [*command, *(f"{key}={value}" for key, value in settings.items())]


def _evaluate(methods: tuple[str, ...], output: Path) -> Step:
    folders = [output / method / "checkpoints" for method in methods]
    report = output / "report" / "extrapolation.json"
    done = _is_newer(report, [folder / "latest" for folder in folders]) and _covers(report, methods)
    command = ["evaluate.py", "--checkpoint", *map(str, folders), "--lengths", *LENGTHS, "--tokens", TOKENS]
    title = "Trained at length 128, tested beyond it"
    return "evaluate at 128 ... 2048 tokens", done, [*command, "--output", str(report.parent), "--title", title]


def _is_newer(file: Path, sources: list[Path]) -> bool:
    return file.is_file() and all(
        source.is_file() and source.stat().st_mtime <= file.stat().st_mtime for source in sources
    )


def _covers(report: Path, methods: tuple[str, ...]) -> bool:
    rows = json.loads(report.read_text())["rows"]
    found = {(row["pos_emb"], str(row["length"])) for row in rows}
    return found == {(method, length) for method in methods for length in LENGTHS}


def _show(folder: Path) -> None:
    """The table, and in a sentence what it says of each method."""
    rows = json.loads((folder / "extrapolation.json").read_text())["rows"]
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
