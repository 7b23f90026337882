"""`make demo`: prepare a corpus and a tokenizer, train three small models, and evaluate how they extrapolate.

python tools/demo.py [--output runs/demo] [--methods kerple_log alibi rotary] [--iterations 600]

Finished steps are skipped. The folder of each result has a file with checksums of its inputs; if the inputs change,
the step runs again.
"""

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.rule import Rule  # noqa: E402

import check_megatron  # noqa: E402, F401
from megatron.evaluation.records import ExtrapolationRecord, extrapolation_records, has_results, read_results  # noqa: E402
from megatron.reporting.aggregate import method_of, setting_of  # noqa: E402
from megatron.reporting.differences import PairedLosses  # noqa: E402
from megatron.utils.command_line import OptionParser, integer, run_main  # noqa: E402
from megatron.utils.environment import has_bf16_instructions  # noqa: E402
from megatron.utils.errors import UserError, shortened  # noqa: E402
from megatron.utils.files import check_writable, read_file, write_atomically  # noqa: E402
from megatron.utils.processes import Lock, signal_without_parent  # noqa: E402
from megatron.utils.progress import readable_time  # noqa: E402
from megatron.utils.typed_json import load_json  # noqa: E402

METHODS = ("kerple_log", "alibi", "rotary")
LENGTHS = ("128", "512", "2048")
CORPUS = "python_stdlib"
INPUTS_FILE = "made_from.json"
MAX_INPUTS_BYTES = 1 << 20

console = Console()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps that are not finished. Returns 0, or the exit status of the step that failed."""
    options = parse_options(argv)
    check_options(options)
    if options.precision is None:
        options.precision = "bfloat16" if not torch.cuda.is_available() and has_bf16_instructions() else "fp32"
        reason = "has" if options.precision == "bfloat16" else "is not known to have"
        where = "a GPU" if torch.cuda.is_available() else f"a processor that {reason} bfloat16 instructions"
        console.print(f"training in {options.precision}, on {where} (--precision chooses)", markup=False)
    check_writable(options.output, "--output")
    check_writable(options.data, "--data")
    with Lock(options.output / "demo.lock", f"{options.output}: another demo is using this folder; wait until it ends"):
        return run(options)


def run(options: argparse.Namespace) -> int:
    started_at = time.perf_counter()
    # prepare_data.py itself skips a corpus that is complete and has the same options.
    status = run_step(
        "prepare the corpus and the tokenizer, from Python's standard library",
        ["prepare_data.py", "-d", str(options.data), CORPUS],
    )
    seconds: list[float] = []  # of the models trained by this process
    for number, method in enumerate(options.methods, start=1):
        left = len(options.methods) - number + 1
        if seconds and not status:
            estimate = readable_time(left * sum(seconds) / len(seconds))
            console.print(f"about {estimate} of training left, and then the evaluation", markup=False)
        trained_at = time.perf_counter()
        status = status or train(method, options, f"model {number} of {len(options.methods)}")
        seconds.append(time.perf_counter() - trained_at)
        if seconds[-1] < 1:  # it was already trained
            seconds.pop()
    status = status or evaluate(options)
    if status:
        console.print("[red]stopped[/]; run the same command again to resume")
        return status
    report = options.output / "report"
    for line in conclusions(extrapolation_records(read_results(report))):
        console.print(line)
    console.print(f"total time {time.perf_counter() - started_at:.0f} s; report: {report}", markup=False)
    return 0


def conclusions(records: Sequence[ExtrapolationRecord]) -> list[str]:
    """Sentences that the standard errors over documents support: for each method, how its loss changes from the
    shortest to the longest length, and how it compares with the first method at the longest length.
    """
    losses = PairedLosses(records)
    shortest, longest = (choose(record["length"] for record in records) for choose in (min, max))
    methods = {record["pos_emb"]: (setting_of(record), method_of(record)) for record in records}
    reference, *others = methods
    lines = []
    for name, method in methods.items():
        change = losses.difference((*method, longest), (*method, shortest))
        if change is not None:
            verb = ("falls" if change.mean < 0 else "rises") if change.significant else "shows no clear change"
            lines.append(f"{name}: from {shortest:,} to {longest:,} tokens the loss {verb} ({change} nats per token)")
    for name in others:
        difference = losses.difference((*methods[name], longest), (*methods[reference], longest))
        if difference is not None:
            verdict = f"{name if difference.mean < 0 else reference} is better" if difference.significant else "a tie"
            lines.append(
                f"{name} minus {reference} at {longest:,}: {difference} nats per token: {verdict} on this text"
            )
    if others:
        lines.append(
            "± is the standard error over documents. With one seed per method, this does not rank the methods in "
            "general."
        )
    return lines


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OptionParser(description="Train three small models on short sequences and test them on long ones.")
    parser.add_argument(
        "--output", type=under_root, default=under_root("runs/demo"), help="folder of the runs and the report"
    )
    parser.add_argument("--data", type=under_root, default=under_root("data"), help="folder of the corpus")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="positional methods (pos-emb)")
    parser.add_argument(
        "--iterations", type=integer(1), default=600, help="training iterations per model (%(default)s)"
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bfloat16"),
        help="precision of training (default: bfloat16 on processors with instructions for it, otherwise fp32)",
    )
    parser.add_argument(
        "--tokens", type=integer(1), default=163_840, help="tokens to score, the same at every length (%(default)s)"
    )
    return parser.parse_args(argv)


def check_options(options: argparse.Namespace) -> None:
    """Raises UserError, before anything is trained, if a step would fail."""
    known = sorted(path.stem for path in (ROOT / "configs" / "pos_emb").glob("*.yml"))
    for method in options.methods:
        if method not in known:
            raise UserError(f"--methods {shortened(method)}: there is no configs/pos_emb file of this name")
        if options.methods.count(method) > 1:
            raise UserError(f"--methods {method}: is given more than once; name each method once")
    longest = int(LENGTHS[-1])
    if options.tokens < longest:
        raise UserError(
            f"--tokens {options.tokens}: the models are evaluated on texts of {longest:,} tokens; choose at least "
            f"{longest}"
        )


def under_root(path: str) -> Path:
    """Relative paths start at the project's folder, where the steps run."""
    return ROOT / path


def run_step(title: str, command: list[str]) -> int:
    """Run a script of this project; returns its exit status."""
    console.print(Rule(title, align="left"))
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, preexec_fn=signal_without_parent(signal.SIGTERM)
    ).returncode


def train(method: str, options: argparse.Namespace, number: str) -> int:
    """number: such as "model 1 of 3"."""
    # Results in this folder are valid only for the same inputs.
    title = f"train {method} at length 128 ({number})"
    folder, corpus = options.output / method, options.data / CORPUS
    checkpoints = folder / "checkpoints"
    inputs = training_inputs(method, options)
    recorded = read_inputs(folder)
    if checkpoints.exists() and recorded is None:
        raise UserError(
            f"{checkpoints}: was not written by the demo, or its {INPUTS_FILE} was deleted; choose another --output, "
            "or delete that folder"
        )
    if checkpoints.exists() and recorded != inputs:
        console.print(f"{folder}: corpus, tokenizer or configuration changed; training again", markup=False)
        # Delete the record of the old inputs last, so that the next run completes a deletion that was killed.
        for name in ("logs", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)

    # A run that was killed resumes from its last checkpoint.
    latest = checkpoints / "latest"
    if latest.is_file() and latest.read_bytes().strip() == b"global_step%d" % options.iterations:
        console.print(f"[green]already done:[/] {title}")
        return 0

    # Record the inputs before training, and train.
    write_inputs(folder, inputs)
    settings = {
        "precision": options.precision,
        "train-iters": options.iterations,
        "lr-decay-iters": options.iterations,
        "save": checkpoints,
        "load": checkpoints,
        "log-dir": folder / "logs",
        "data-path": corpus / f"{CORPUS}_text_document",
        "vocab-file": corpus / "tokenizer.json",
    }
    command = ["deepy.py", "train.py", "-d", "configs", "demo.yml", f"pos_emb/{method}.yml", "--set"]
    return run_step(title, [*command, *(f"{key}={value}" for key, value in settings.items())])


def evaluate(options: argparse.Namespace) -> int:
    title, report = f"evaluate at {LENGTHS[0]} to {LENGTHS[-1]} tokens", options.output / "report"
    inputs = {
        "models": {method: training_inputs(method, options) for method in options.methods},
        "lengths": list(LENGTHS),
        "tokens": options.tokens,
    }
    if has_results(report) and read_inputs(report) == inputs:
        console.print(f"[green]already done:[/] {title}")
        return 0
    command = [
        "evaluate.py",
        "--checkpoint",
        *(str(options.output / method / "checkpoints") for method in options.methods),
    ]
    command += ["--lengths", *LENGTHS, "--tokens", str(options.tokens), "--output", str(report), "--replace"]
    status = run_step(title, command)
    if status == 0:
        write_inputs(report, inputs)
    return status


def training_inputs(method: str, options: argparse.Namespace) -> dict[str, object]:
    """Checksums of the files that determine a trained model, its number of iterations and its precision."""
    corpus = options.data / CORPUS
    files = {
        "corpus": corpus / f"{CORPUS}_text_document.idx",
        "tokenizer": corpus / "tokenizer.json",
        "configuration": ROOT / "configs" / "demo.yml",
        "method": ROOT / "configs" / "pos_emb" / f"{method}.yml",
    }
    checksums = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return {**checksums, "iterations": options.iterations, "precision": options.precision}


def read_inputs(folder: Path) -> object:
    """The recorded inputs of a folder; None if there is no record. Raises UserError if it is not JSON."""
    path = folder / INPUTS_FILE
    return load_json(read_file(path, MAX_INPUTS_BYTES), str(path)) if path.exists() else None


def write_inputs(folder: Path, inputs: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / INPUTS_FILE, (json.dumps(inputs, indent=2) + "\n").encode())


if __name__ == "__main__":
    sys.exit(run_main(main))
