"""Hostile datasets, inputs of preprocessing, journals, downloads and results: `GROUPS`, together with checkpoints.py.

Each function writes valid files to an empty folder and then changes one of them.
"""

import bz2
import contextlib
import filecmp
import functools
import gzip
import io
import json
import lzma
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import zstandard
from hypothesis import strategies as st

from megatron.checkpoint.directory import find_step, weights_fingerprint
from megatron.data.indexed_dataset import HEADER
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import plan
from tests.soak import checkpoints
from tests.soak.cases import SECONDS, Case, Draw, MakeCase, pick
from tests.soak.changes import archive, damage, flip, spoil, value_in
from tests.support import hostile
from tests.support.checkpoints import settings_of, write_checkpoint, write_corpus
from tests.support.corpora import json_lines
from tests.support.forks import start_run
from tests.support.hostile import NAMES, page_problem, valid_records
from tests.support.servers import serve_bytes
from tests.support.sweeps import fake_training, write_sweep
from tests.support.texts import KINDS, PYTHON

PREPROCESS = ["tools/datasets/preprocess_data.py", "--tokenizer-type", "CharLevelTokenizer", "--append-eod"]


def _lines(draw: Draw) -> bytes:
    lines = [json_lines(text) for text in KINDS.values()]
    lines += [pick(draw, hostile.JSON_LINES) + b"\n" for _ in range(3)]
    return b"".join(draw(st.permutations(lines)))


def _json_list(draw: Draw) -> bytes:
    content = json.dumps(value_in(draw, [{"text": text} for text in KINDS.values()])).encode()
    return pick(draw, (content, b"\xef\xbb\xbf" + content, content + b"[]", b"[" + content, content[:-1]))


def _dat(draw: Draw) -> bytes:
    length = pick(draw, (b"9" * 16, b"0" * 16, b"-000000000000001", b"00000000000000_1", b"\xd9\xa1" * 8, b" " * 16))
    return b"".join(b"%016d" % len(text.encode()) + text.encode() for text in KINDS.values()) + length + b"text"


def _parquet(draw: Draw) -> bytes:
    columns = (["a", None, "b"], [1, 2], [b"\xff"], [["a"]], ["x" * 100_000] * 50, [{"a": 1}], [])
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({pick(draw, ("text", "text", "other")): pick(draw, columns)}), stream)
    return damage(draw, stream.getvalue()) if flip(draw) else stream.getvalue()


@functools.cache
def _bomb() -> bytes:
    """700 MB of zeros without a line end, as gzip of several members."""
    return gzip.compress(bytes(7 << 20), 9) * 100


def _archive(kind: str, draw: Draw) -> bytes:
    """An archive with a file of hostile lines or a bomb among ordinary ones."""
    files = {f"folder/{number}.jsonl": json_lines("text") for number in range(pick(draw, (1, 3, 500, 2000)))}
    name, content = pick(draw, (("lines.jsonl", _lines(draw)), ("bomb.txt.gz", _bomb())))
    return archive(draw, kind, {**files, name: content})


FORMATS: dict[str, Callable[[Draw], bytes]] = {
    ".jsonl": _lines, ".json": _json_list, ".txt": lambda draw: draw(st.binary(max_size=1000)), ".dat": _dat,
    ".parquet": _parquet, ".tar": functools.partial(_archive, "tar"), ".zip": functools.partial(_archive, "zip"),
}  # fmt: skip
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress,
    ".zst": zstandard.compress, ".bz2": bz2.compress,
}  # fmt: skip
# Frames of Zstandard that announce a large window or content.
FRAMES = (b"\x00\xff", b"\xc0\xa8", b"\xe0", b"\x00\xa8", b"\x03\x58")


def hostile_input(draw: Draw, folder: Path) -> Case:
    """A file of any format and compression, for preprocess_data.py."""
    suffix, compression = pick(draw, FORMATS), pick(draw, ["", "", *COMPRESSIONS])
    how = pick(draw, ("valid", "valid", "valid", "spoiled", "bomb", "frame"))
    if how == "bomb":
        suffix, compression, content = pick(draw, (".txt", ".jsonl", ".tar", ".dat", ".json")), ".gz", _bomb()
    elif how == "frame":
        compression, content = ".zst", b"\x28\xb5\x2f\xfd" + pick(draw, FRAMES) + draw(st.binary(max_size=100))
    else:
        content = COMPRESSIONS[compression](FORMATS[suffix](draw))
    name = pick(draw, ("input", "input", "input", "in put\x1b[31m", "é\udcff"))
    path = Path(os.fsdecode(os.fsencode(folder / f"{name}{suffix}{compression}")))
    path.write_bytes(content)
    if how == "spoiled":
        spoil(draw, path)
    command = [*PREPROCESS, "--input", pick(draw, (str(path), str(folder))), "--output-prefix", "out"]
    options = ([], ["--bad-documents", "skip"], ["--pile-subset", "Github"], ["--suffixes", suffix])
    return Case([*command, *pick(draw, options)])


def small_work_items(size: int) -> dict[str, object]:
    """Constants for preprocessing in work items of `size` bytes, each of which is committed."""
    return {
        "megatron.preparation.preprocessing:COMMIT_INTERVAL_SECONDS": 0.0,
        "megatron.preparation.readers:BLOCK": size // 2,
        "megatron.preparation.encoding:WORK_ITEM_BYTES": size,
    }


SMALL_WORK_ITEMS = small_work_items(1200)
PREPROCESS_SOURCE = [*PREPROCESS, "--input", "source.jsonl", "--output-prefix", "data"]


@functools.cache
def dataset() -> Path:
    """A temporary folder with a file of 40 documents, source.jsonl, and its dataset, data_text_document."""
    folder = checkpoints.base() / "dataset"
    folder.mkdir()
    lines = json_lines(*(PYTHON[start : start + 300] for start in range(0, 12_000, 300)))
    (folder / "source.jsonl").write_bytes(lines)
    _preprocess(folder, 10**9)
    return folder


def _preprocess(folder: Path, items: int) -> None:
    """Run `PREPROCESS_SOURCE` in a fork, and end it without warning after `items` work items."""

    def prepare() -> None:
        add, left = IndexedWriter.add, iter(range(items))
        IndexedWriter.add = lambda *arguments: os._exit(9) if next(left, None) is None else add(*arguments)

    log = folder / "preprocess.log"
    start_run(PREPROCESS_SOURCE, log, constants=SMALL_WORK_ITEMS, prepare=prepare).wait(SECONDS)


def hostile_dataset(draw: Draw, folder: Path) -> Case:
    """A `.bin`, an `.idx` or a manifest, for training and the dataset tools."""
    shutil.copytree(dataset(), folder, dirs_exist_ok=True)
    prefix = str(folder / "data_text_document")
    path = Path(prefix + pick(draw, (".idx", ".idx", ".idx", ".bin", ".json")))
    if path.suffix == ".idx" and flip(draw):  # a wrong entry of the header or of one of the three arrays
        content = bytearray(path.read_bytes())
        start = pick(draw, (draw(st.integers(9, HEADER.size)), draw(st.integers(9, len(content) - 8))))
        code, limit = pick(draw, (("<i", 2**31), ("<q", 2**63)))
        struct.pack_into(code, content, start, pick(draw, (-1, 0, 1, limit - 1, -limit)))
        path.write_bytes(content)
    else:
        spoil(draw, path)
    settings = settings_of("kerple_log", prefix, train_iters=1, eval_iters=0)
    (folder / "config.yml").write_text(json.dumps(settings))
    inspect = ["tools/datasets/inspect_dataset.py", prefix]
    commands = (
        ["train.py", "config.yml"],
        inspect,
        [*inspect, "--sample", "0", "3", "--tokenizer-type", "CharLevelTokenizer"],
        ["tools/datasets/merge_datasets.py", "--input", prefix, "--output-prefix", "out"],
        ["tools/datasets/split_dataset.py", "--input", prefix, "--output-prefix", "out", "--split", "8,1,1"],
    )
    return Case(pick(draw, commands))


def hostile_journal(draw: Draw, folder: Path) -> Case:
    """The journal and the partial files of an interrupted preprocess_data.py, which then resumes.

    If it succeeds, the dataset must be that of an uninterrupted run.
    """
    shutil.copy(dataset() / "source.jsonl", folder)
    _preprocess(folder, draw(st.integers(1, 7)))
    journal = folder / "data.progress.json"
    path = pick(draw, [journal] * 4 + sorted(set(folder.glob("data*partial*")) - set(folder.glob("*.lock"))))
    if path == journal and flip(draw):
        checksum, _, text = path.read_bytes().partition(b"\n")
        path.write_bytes(checksum + b"\n" + json.dumps(value_in(draw, json.loads(text))).encode())
    else:
        spoil(draw, path)

    def problem(status: int, output: str) -> str | None:
        names = [f"data_text_document{suffix}" for suffix in (".bin", ".idx")]
        if status == 0 and filecmp.cmpfiles(folder, dataset(), names, shallow=False)[0] != names:
            return "the dataset differs from that of an uninterrupted run"
        return None

    return Case(PREPROCESS_SOURCE, constants=SMALL_WORK_ITEMS, problem=problem)


def _response(draw: Draw) -> bytes:
    headers = draw(st.lists(st.sampled_from(hostile.HTTP_HEADERS), max_size=3, unique=True))
    head = b"\r\n".join([pick(draw, hostile.HTTP_STATUSES), *headers]) + b"\r\n\r\n"
    content = head + pick(draw, hostile.HTTP_BODIES)
    return pick(draw, (content, content, damage(draw, content)))


def hostile_download(draw: Draw, folder: Path) -> Case:
    """A server for prepare_data.py."""
    resources = contextlib.ExitStack()
    address = resources.enter_context(serve_bytes([_response(draw) for _ in range(pick(draw, (1, 2, 5)))]))
    command = ["prepare_data.py", "enwik8", "-d", "data", "-t", "CharLevelTokenizer", "--workers", "1"]
    return Case([*command, "--url", f"{address}/{pick(draw, hostile.URL_PATHS)}"], resources=resources)


REPORT = ["tools/report.py", "--output", "out"]
EVALUATE = ["evaluate.py", "--checkpoint", "checkpoints", "--lengths", "32", "--tokens", "128", "--output", "again"]
CHOMSKY = {"steps": 1, "batch": 2, "train_longest": 4, "test_longest": 6, "test_samples": 2, "num_layers": 1}
CHOMSKY |= {"hidden_size": 16, "num_heads": 2}
NUMBERS = ("0", "-1", "10000000000", "1" + "0" * 5000, "1e3", "1e300", "nan", ".nan", "1000000000000", "x", "")
OPTIONS = """--by-position= --lengths= --tokens= --resolution= --passkey-trials= --query-chunk= --batch-tokens=
--passkey-depths= --protocol=kerple@ --protocol=last-k@ --protocol=sliding@ --modes=window@ --modes=blockwise@"""


def write_lines(path: Path, *documents: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def write_finished_sweep(folder: Path) -> list[Path]:
    """sweep.yml, a sweep of one run, and what the run has written. Returns its metrics and its journal."""
    sweep = write_sweep(folder, axes={"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}, evaluation={"lengths": [32]})
    config = json.loads(plan(read_sweep(str(sweep)))[0].write_config().read_bytes())
    fake_training(config, ["", "kerple_command.py", "train"], None, io.StringIO())
    fingerprint = weights_fingerprint(find_step(Path(config["save"])))
    journal = Path(config["save"]).parent / "evaluation" / "evaluated.json"
    write_lines(journal, {"fingerprint": fingerprint, "options": [["--lengths", "32"]]})
    write_lines(journal.with_name("results.jsonl"))
    return [Path(config["log_dir"]) / "metrics.jsonl", journal]


def hostile_result(draw: Draw, folder: Path) -> Case:
    """Results, names, benchmarks, Chomsky results, sweep metrics and journals, earlier evaluations, prompts, options,
    for the commands that read them.
    """
    name, title, records = pick(draw, NAMES), pick(draw, [name for name in NAMES if len(name) < 300]), valid_records()
    place = title.replace("/", "_").strip(". ")[:100] or "in"
    report = [*REPORT, str(folder / place), f"--title={title}"]
    write_checkpoint(folder / "checkpoints", "kerple_log", write_corpus(folder))

    # Kind -> a file, its valid content, and a command that reads it.
    tables = {name: [{"name": row, "median": 0.5, "ratio": 1.2} for row in ("alibi", name)], "b": []}
    settings = CHOMSKY | {"learning_rate": 1e-3, "test_every": 1, "architecture": "pre-norm"}
    score = {"task": "even_pairs", "seed": 0, "score": 0.375, "accuracies": {"5": 0.5, "6": 0.25}}
    scores = [{**score, "pos_emb": method} for method in ("none", name)]
    words = [word for option, value in CHOMSKY.items() for word in (f"--{option}", str(value))]
    number = pick(draw, NUMBERS)
    limit = pick(draw, ("maximum_tokens=", "num_samples=", "top_k=", "temperature=", "top_p=")) + number
    generate = ["generate.py", *EVALUATE[1:3], "-i", "prompts", "-o", "out.jsonl", "--set", limit, "maximum_tokens=4"]
    files: dict[str, tuple[str, Sequence[object], list[str]]] = {
        "results": (f"{place}/results.jsonl", records, report),
        "benchmark": (f"{place}.json", [{"hardware": {"processor": name}, "tables": tables}],
                      [*REPORT, "--benchmark", f"{folder / place}.json"]),
        "chomsky": ("chomsky.json", [{"settings": settings, "results": scores}],
                    ["tools/chomsky.py", "--tasks", "even_pairs", "--methods", "none", "--output", ".", *words]),
        "evaluation": ("again/results.jsonl", records, [*EVALUATE, "--replace"]),
        "prompts": ("prompts", NAMES, generate),
    }  # fmt: skip
    kind = pick(draw, ("results", "sweep", "sweep", "names", "options", *files))
    if kind == "sweep":
        spoil(draw, pick(draw, write_finished_sweep(folder)))
        command = ["tools/sweep.py", "sweep.yml", "--dry-run"]
    elif kind == "names":
        for entry in records:  # few names, because there is a figure for each corpus
            entry |= {key: pick(draw, (title, "b")) for key in ("pos_emb", "corpus", "mode", "protocol", "note")}
            entry["checkpoint"] = {**entry["checkpoint"], "path": pick(draw, NAMES)}
        path, documents, command = files["results"]
        write_lines(folder / path, *documents)
    elif kind == "options":
        option = pick(draw, ("--label", "--title", "--compare-with"))
        command = [*EVALUATE, pick(draw, OPTIONS.split()) + number, f"{option}={name}"]
    else:
        path, documents, command = files[kind]
        write_lines(folder / path, *documents)
        spoil(draw, folder / path)

    def problem(status: int, output: str) -> str | None:
        pages = [folder / name / "report.html" for name in ("out", "again")]
        return next((page_problem(page.read_text()) for page in pages if page.is_file()), None)

    return Case(command, statuses=(0, 1, 2), problem=problem)


GROUPS: dict[str, MakeCase] = {
    "inputs of preprocessing": hostile_input,
    "datasets (.bin, .idx, manifest)": hostile_dataset,
    "journals of preprocessing": hostile_journal,
    "downloads": hostile_download,
    "results, metrics, journals, names": hostile_result,
    **checkpoints.GROUPS,
}
