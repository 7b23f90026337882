"""Hostile results files, sweep journals, metrics, benchmark files and names, and the commands that read them.

    for case in cases(folder, seed, count):
        completed = subprocess.run([sys.executable, *case.command], cwd=ROOT, env=environment(), ...)
        problem = case.problem(completed.returncode, completed.stdout + completed.stderr)

Each case is a valid file with one or several random changes. A command must succeed or end with one clear line.
"""

import copy
import html.parser
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import layer_file, weights_fingerprint
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import plan
from tests.support.records import passkey_record, record
from tests.support.sweeps import write_sweep

# Each of these would execute, include or draw something if it were not escaped.
NAMES = (
    '"><img src=x onerror=alert(1)>',
    "<script>alert(1)</script>",
    "</title><script>alert(1)</script>",
    "'><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "]]><!-- &lt;b&gt; &#60;",
    "a|b *c* _d_ `e` [f](javascript:alert(1)) <b>",
    "$x$ $\\frac{$ \\frac{ $$ ^_",
    "\\input{/etc/passwd} \\write18{id} % & # ~ ^ { }",
    '=cmd|"/c calc"!A1',
    "../../../../tmp/hostile",
    "/etc/passwd",
    ".",
    "-rf",
    "[bold red]rich[/] [/link]",
    "ünïcödé 漢字 عربى 🎉",
    "x" * 4000,
    "",
    " ",
)
VALUES: tuple[Any, ...] = (
    *NAMES,
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    10**400,
    0.5,
    -0.0,
    5e-324,
    1e-300,
    1e300,
    -1e308,
    float("nan"),
    float("inf"),
    "\x1b[31m\x07",
    "a\nb\r\tc",
    "\u202egnp",
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    [1, "2", None],
    "x" * 10**6,
)
# Texts that JSON parsers have had trouble with. They replace a value in the file.
RAW = ("1e999", "-1e999", "1" * 5000, "[" * 100_000, '{"a":' * 5000, "01", "1.", '"\\ud800"', '"\\u0000"', "nul", "")


@dataclass(frozen=True)
class Case:
    """A hostile input. command: words after the interpreter, relative to the root of the project."""

    description: str
    command: list[str]
    output: Path | None = None

    def problem(self, status: int, text: str) -> str | None:
        """What is wrong with the command's exit status, its output (both streams) or its report; None if nothing."""
        if status not in (0, 1, 2) or "Traceback" in text or "unexpected error" in text:
            return f"exit status {status}: {text[-2000:]}"
        hidden = [character for character in text if not character.isprintable() and character not in "\n\t"]
        if hidden:
            return f"unprintable characters in the output: {hidden[:5]}"
        if status and not any(line.startswith("error: ") or "error:" in line for line in text.splitlines()):
            return f"exit status {status} without an error: {text[-500:]}"
        report = self.output / "report.html" if self.output else None
        return page_problem(report.read_text()) if report and report.is_file() else None


class _Page(html.parser.HTMLParser):
    """Collects what a page must not have: scripts, event handlers, external addresses, duplicate ids."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._ids: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "base", "form", "svg"):
            self.problems.append(f"element {tag}")
        for name, value in attributes:
            address = value or ""
            if name.startswith("on") or (name in ("src", "href") and not address.startswith(("data:", "#"))):
                self.problems.append(f"{tag} {name}={address[:80]}")
            if name == "id":
                self.problems += [f"id {address!r}"] if address in self._ids or not address.isprintable() else []
                self._ids.add(address)


def page_problem(text: str) -> str | None:
    """Why an HTML report is not safe; None if it is."""
    page = _Page()
    page.feed(text)
    if "script-src 'none'" not in text and "default-src 'none'" not in text:
        page.problems.append("no Content-Security-Policy that forbids scripts")
    return "; ".join(page.problems) or None


# -- changes ----------------------------------------------------------------------------------------------------------


def change_value(generator: random.Random, value: Any) -> Any:
    """The value with a random part of it replaced, removed, repeated or nested."""
    value = copy.deepcopy(value)
    parent, key = _random_part(generator, value)
    if parent is None:
        return generator.choice(VALUES)
    action = generator.random()
    if action < 0.7:
        parent[key] = generator.choice(VALUES)
    elif action < 0.85:
        del parent[key]
    elif isinstance(parent, list):
        parent += [parent[key]] * generator.choice((1, 100, 10_000))
    else:
        parent[generator.choice(NAMES)] = parent[key]
    return value


def _random_part(generator: random.Random, value: Any) -> tuple[Any, Any]:
    parent = key = None
    while isinstance(value, dict | list) and value:
        if parent is not None and generator.random() < 0.3:
            break
        parent, key = value, generator.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = parent[key]
    return parent, key


def change_text(generator: random.Random, content: bytes) -> bytes:
    """The content cut, with damaged bytes, or with a value replaced by text that is not JSON."""
    if not content:
        return b"\x00"
    place = generator.randrange(len(content))
    action = generator.randrange(5)
    if action == 0:
        return content[:place]
    if action == 1:
        return content[:place] + bytes(generator.randrange(256) for _ in range(4)) + content[place + 4 :]
    if action == 2:
        return content[:place] + content[place // 2 :]
    start, end = content.rfind(b":", 0, place) + 1, content.find(b",", place)
    raw = generator.choice(RAW).encode()
    return content[:start] + raw + (content[end:] if end > start else b"}\n")


def write_hostile(generator: random.Random, path: Path, documents: list[Any]) -> str:
    """Write documents, one per line, with random changes; returns a description."""
    kind = generator.choices(("values", "text", "lines", "file"), (70, 20, 6, 4))[0]
    changed = list(documents)
    if kind == "values":
        for _ in range(generator.choice((1, 1, 2, 5))):
            index = generator.randrange(len(changed))
            changed[index] = change_value(generator, changed[index])
    elif kind == "lines":
        changed = generator.choices(changed, k=generator.choice((1, 3, 2000)))
    content = "".join(json.dumps(document) + "\n" for document in changed).encode()
    if kind == "text":
        content = change_text(generator, content)
    if kind == "file":
        special = generator.choice(("zero", "fifo", "folder", "empty", "dangling"))
        if special == "fifo":
            os.mkfifo(path)
        elif special == "folder":
            path.mkdir()
        elif special == "empty":
            path.write_bytes(b"")
        else:
            path.symlink_to("/dev/zero" if special == "zero" else path.with_name("nowhere"))
        return special
    path.write_bytes(content)
    return kind


# -- cases ------------------------------------------------------------------------------------------------------------


def valid_records(name: str = "kerple_log") -> list[dict[str, Any]]:
    """Records of every kind, of two methods, seeds and lengths, with the keys that evaluate.py writes."""
    records = []
    for pos_emb, offset in ((name, 0.0), ("alibi", 0.2)):
        for seed in (1, 2):
            for length in (32, 64):
                loss = 2.0 + offset + seed / 100
                keys: dict[str, Any] = {"segments": 4, "documents": 2, "stderr": 0.1, "bits_per_byte": 1.5}
                keys |= {"targets": "ab", "measurement": "cd", "loss": loss}
                keys |= {"groups": {"tokens": [500, 500], "losses": [loss, loss]}}
                losses = record(pos_emb, length, 8.0 + offset, seed, **keys)
                positions = {"kind": "positions", "edges": [0, 16, 32], "losses": [loss, loss], "counts": [9, 9]}
                resolution = {"kind": "resolution", "texts": 2, "layers": [0.1, 0.2], "resolution": 0.15}
                effective = {"kind": "effective_length", "layers": ["all layers"], "effective_lengths": [[3, 9]]}
                passkey = passkey_record(pos_emb, length, 0.5, 0.4, seed=seed, measurement="ef")
                context = {"kind": "context", "contexts": [8, 16], "differences": [0.2, 0.1], "stderrs": [0.01, None]}
                records += [losses, {**losses, **positions}, {**losses, **resolution}, {**losses, **effective}, passkey]
                records.append({**losses, **context})
    return records


def cases(folder: Path, seed: int, count: int, checkpoint: Path | None = None) -> Iterator[Case]:
    """`count` cases, each in a folder of its own below `folder`; the same for the same seed.

    checkpoint: a small checkpoint with its tokenizer and validation text, for cases of evaluate.py and generate.py.
    """
    generator = random.Random(seed)
    makers = [_results, _results, _results, _names, _names, _benchmark, _metrics, _journal, _chomsky]
    for index in range(count):
        place = folder / f"{seed}-{index}"
        place.mkdir(parents=True)
        maker = generator.choice([*makers, *([_evaluation, _evaluation, _prompts] if checkpoint else [])])
        yield maker(generator, place, checkpoint)


def _report(place: Path, *words: str) -> list[str]:
    return ["tools/report.py", *words, "--output", str(place / "out")]


def _results(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    (place / "in").mkdir()
    changed = write_hostile(generator, place / "in" / "results.jsonl", valid_records())
    return Case(f"report of results: {changed}", _report(place, str(place / "in")), place / "out")


def _names(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    """Valid results with hostile names in every field, folder and option."""
    chosen = [generator.choice([name for name in NAMES if len(name) < 300]) for _ in range(6)]
    names = dict(zip(("pos_emb", "corpus", "mode", "protocol", "note", "title"), chosen, strict=True))
    source = place / (names["title"].replace("/", "_").strip(". ")[:100] or "in")
    source.mkdir()
    records = valid_records()
    for entry in records:
        if generator.random() < 0.6:
            entry |= {key: names[key] for key in ("pos_emb", "corpus", "mode", "protocol", "note")}
        entry["checkpoint"] = {**entry["checkpoint"], "path": generator.choice(NAMES), "fingerprint": names["note"]}
    (source / "results.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in records))
    return Case(f"report of names {names}", _report(place, str(source), f"--title={names['title']}"), place / "out")


def _benchmark(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    rows = [{"name": name, "median": 0.5, "ratio": 1.2} for name in ("alibi", generator.choice(NAMES))]
    content = {"hardware": {"processor": generator.choice(NAMES)}, "tables": {generator.choice(NAMES): rows, "b": []}}
    path = place / f"{generator.choice(NAMES).replace('/', '_')[:100]}.json"
    changed = write_hostile(generator, path, [content])
    return Case(f"report of a benchmark: {changed}", _report(place, "--benchmark", str(path)), place / "out")


def _sweep(place: Path) -> tuple[list[str], Path]:
    axes = {"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}
    path = write_sweep(place, axes=axes, evaluation={"lengths": [32]})
    return ["tools/sweep.py", str(path), "--dry-run"], place / "out" / "runs" / "alibi" / "7"


def _metrics(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    command, run = _sweep(place)
    (run / "logs").mkdir(parents=True)
    lines = [{"iteration": n, "train/tokens": 256.0 * n, "train/tokens_per_second": 512.0} for n in range(1, 7)]
    return Case(f"metrics: {write_hostile(generator, run / 'logs' / 'metrics.jsonl', lines)}", command)


def _journal(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    command, run = _sweep(place)
    config = plan(read_sweep(command[1]))[0].write_config()
    step = run / "checkpoints" / "global_step6" / "configs"
    step.mkdir(parents=True)
    (step / "config.yml").write_bytes(config.read_bytes())
    layer_file(step.parent, 0, 0).write_text("weights")
    (run / "checkpoints" / "latest").write_text("global_step6")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "results.jsonl").write_text("")
    journal = {"fingerprint": weights_fingerprint(step.parent), "options": [["--lengths", "32"]]}
    changed = write_hostile(generator, run / "evaluation" / "evaluated.json", [journal])
    return Case(f"journal: {changed}", command)


CHOMSKY = {"steps": 1, "batch": 2, "train-longest": 4, "test-longest": 6, "test-samples": 2, "num-layers": 1}


def _chomsky(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    options = {**CHOMSKY, "hidden-size": 16, "num-heads": 2}
    settings = {name.replace("-", "_"): value for name, value in options.items()}
    settings |= {"learning_rate": 1e-3, "test_every": 1, "architecture": "pre-norm"}
    accuracies = {"5": 0.5, "6": 0.25}
    results = [
        {"task": "even_pairs", "pos_emb": name, "seed": 0, "score": 0.375, "accuracies": accuracies}
        for name in ("none", generator.choice(NAMES))
    ]
    changed = write_hostile(generator, place / "chomsky.json", [{"settings": settings, "results": results}])
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = ["tools/chomsky.py", "--tasks", "even_pairs", "--methods", "none", "--output", str(place), *words]
    return Case(f"Chomsky results: {changed}", command)


def _evaluation(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    command = ["evaluate.py", "--checkpoint", str(checkpoint), "--lengths", "32", "--tokens", "128"]
    if generator.random() < 0.5:
        changed = write_hostile(generator, place / "results.jsonl", valid_records())
        return Case(f"evaluation with earlier results: {changed}", [*command, "--output", str(place), "--replace"])
    numbers = ("0", "-1", "10000000000", "1" + "0" * 5000, "1e3", "nan", "1000000000000", "x", "")
    names = ("--by-position", "--lengths", "--tokens", "--resolution", "--passkey-trials", "--query-chunk")
    names += ("--batch-tokens", "--passkey-depths", "--protocol=kerple@", "--protocol=last-k@", "--protocol=sliding@")
    names += ("--modes=window@", "--modes=blockwise@", "--label", "--title", "--compare-with")
    words = []
    for name in generator.sample(names, 2):
        value = generator.choice(NAMES if name in ("--label", "--title", "--compare-with") else numbers)
        words.append(f"{name}{value}" if name.endswith("@") else f"{name}={value}")
    return Case(f"evaluation with options {words}", [*command, *words, "--output", str(place / "out")])


def _prompts(generator: random.Random, place: Path, checkpoint: Path | None) -> Case:
    path = place / "prompts"
    changed = write_hostile(generator, path, list(NAMES))
    numbers = ("0", "-1", "1000000000000", "1e300", ".nan", "4")
    keys = ("maximum_tokens", "num_samples", "top_k", "temperature", "top_p")
    words = [f"{generator.choice(keys)}={generator.choice(numbers)}", "maximum_tokens=4"]
    if generator.random() < 0.5:
        words.reverse()
    command = ["generate.py", "--checkpoint", str(checkpoint), "-i", str(path), "-o", str(place / "out.jsonl")]
    return Case(f"prompts: {changed}, {words}", [*command, "--set", *words])
