"""Damaged datasets, inputs of preprocessing, journals, results and checkpoints: `GROUPS`.

Each function writes valid files to an empty folder and then changes one of them.
"""

import atexit
import filecmp
import functools
import gzip
import io
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import transformers
import zstandard
from hypothesis import strategies as st

from megatron.checkpoint.directory import find_step
from megatron.checkpoint.manifest import weights_fingerprint, write_manifest_of_folder
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import plan
from megatron.tokenizer.hugging_face import train_bpe
from tests.soak.cases import SECONDS, Case, Draw, MakeCase, pick
from tests.soak.changes import damage, spoil
from tests.support.archives import tar_of, zip_of
from tests.support.checkpoints import settings_of, write_checkpoint, write_corpus
from tests.support.corpora import json_lines
from tests.support.forks import start_run
from tests.support.hostile import valid_records
from tests.support.release import checkpoints
from tests.support.sweeps import fake_training, write_sweep
from tests.support.texts import KINDS, PYTHON

PREPROCESS = [
    "tools/datasets/preprocess_data.py",
    "--tokenizer-type",
    "CharLevelTokenizer",
    "--append-eod",
]
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@functools.cache
def inputs() -> dict[str, bytes]:
    """Suffix -> content of an input of preprocessing in each format."""
    lines, stream = json_lines(*KINDS.values()), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(KINDS.values())}), stream)
    files = {f"folder/{number}.jsonl": lines for number in range(3)}
    return {
        ".jsonl": lines,
        ".json": json.dumps([{"text": text} for text in KINDS.values()]).encode(),
        ".txt": PYTHON.encode(),
        ".parquet": stream.getvalue(),
        ".tar": tar_of(files),
        ".zip": zip_of(files),
    }


def damaged_input(draw: Draw, folder: Path) -> Case:
    """A file of any format and compression, for preprocess_data.py."""
    suffix = pick(draw, inputs())
    compression = "" if suffix in (".parquet", ".zip") else pick(draw, COMPRESSIONS)
    path = folder / f"input{suffix}{compression}"
    path.write_bytes(COMPRESSIONS[compression](inputs()[suffix]))
    spoil(draw, path)
    command = [*PREPROCESS, "--input", str(path), "--output-prefix", "out"]
    return Case([*command, *pick(draw, ([], ["--bad-documents", "skip"]))])


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
def base() -> Path:
    """A temporary folder, removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    atexit.register(shutil.rmtree, folder)
    return folder


@functools.cache
def dataset() -> Path:
    """A folder with a file of 40 documents, source.jsonl, and its dataset, data_text_document."""
    folder = base() / "dataset"
    folder.mkdir()
    lines = json_lines(*(PYTHON[start : start + 300] for start in range(0, 12_000, 300)))
    (folder / "source.jsonl").write_bytes(lines)
    _preprocess(folder, 10**9)
    return folder


def _preprocess(folder: Path, items: int) -> None:
    """Run `PREPROCESS_SOURCE` in a fork, and end it without warning after `items` work items."""

    def prepare() -> None:
        add, left = IndexedWriter.add, iter(range(items))
        IndexedWriter.add = lambda *arguments: (
            os._exit(9) if next(left, None) is None else add(*arguments)
        )

    log = folder / "preprocess.log"
    start_run(PREPROCESS_SOURCE, log, constants=SMALL_WORK_ITEMS, prepare=prepare).wait(SECONDS)


def damaged_dataset(draw: Draw, folder: Path) -> Case:
    """A `.bin`, an `.idx` or a manifest, for training and the dataset tools."""
    shutil.copytree(dataset(), folder, dirs_exist_ok=True)
    prefix = str(folder / "data_text_document")
    spoil(draw, Path(prefix + pick(draw, (".idx", ".idx", ".bin", ".json"))))
    settings = settings_of("kerple_log", prefix, train_iters=1, eval_iters=0)
    (folder / "config.yml").write_text(json.dumps(settings))
    commands = (
        ["train.py", "config.yml"],
        ["tools/datasets/merge_datasets.py", "--input", prefix, "--output-prefix", "out"],
    )
    return Case(pick(draw, commands))


def damaged_journal(draw: Draw, folder: Path) -> Case:
    """The journal and the partial files of an interrupted preprocess_data.py, which then resumes.

    If it succeeds, the dataset must be that of an uninterrupted run.
    """
    shutil.copy(dataset() / "source.jsonl", folder)
    _preprocess(folder, draw(st.integers(1, 7)))
    partial = sorted(set(folder.glob("data*partial*")) - set(folder.glob("*.lock")))
    spoil(draw, pick(draw, [folder / "data.progress.json"] * 4 + partial))

    def problem(status: int, output: str) -> str | None:
        names = [f"data_text_document{suffix}" for suffix in (".bin", ".idx")]
        if status == 0 and filecmp.cmpfiles(folder, dataset(), names, shallow=False)[0] != names:
            return "the dataset differs from that of an uninterrupted run"
        return None

    return Case(PREPROCESS_SOURCE, constants=SMALL_WORK_ITEMS, problem=problem)


REPORT = ["kerple_command.py", "report", "--output", "out", "in"]
EVALUATE = [
    "evaluate.py",
    "--checkpoint",
    "checkpoints",
    "--lengths",
    "32",
    "--tokens",
    "128",
    "--output",
    "again",
]


def write_lines(path: Path, *documents: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def write_finished_sweep(folder: Path) -> list[Path]:
    """sweep.yml, a sweep of one run, and what the run has written. Returns its metrics and its
    journal.
    """
    sweep = write_sweep(
        folder, axes={"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}, evaluation={"lengths": [32]}
    )
    config = json.loads(plan(read_sweep(str(sweep)))[0].write_config().read_bytes())
    fake_training(config, ["", "kerple_command.py", "train"], None, io.StringIO())
    fingerprint = weights_fingerprint(find_step(Path(config["save"])))
    journal = Path(config["save"]).parent / "evaluation" / "evaluated.json"
    write_lines(journal, {"fingerprint": fingerprint, "options": [["--lengths", "32"]]})
    write_lines(journal.with_name("results.jsonl"))
    return [Path(config["log_dir"]) / "metrics.jsonl", journal]


def damaged_result(draw: Draw, folder: Path) -> Case:
    """Results, sweep metrics and journals, and earlier evaluations, for the commands that read
    them.
    """
    records = valid_records()
    write_checkpoint(folder / "checkpoints", "kerple_log", write_corpus(folder))

    # Kind -> a file, its valid content, and a command that reads it.
    files: dict[str, tuple[str, Sequence[object], list[str]]] = {
        "results": ("in/results.jsonl", records, REPORT),
        "evaluation": ("again/results.jsonl", records, [*EVALUATE, "--replace"]),
    }
    kind = pick(draw, ("sweep", *files))
    if kind == "sweep":
        spoil(draw, pick(draw, write_finished_sweep(folder)))
        return Case(["kerple_command.py", "sweep", "sweep.yml", "--dry-run"], statuses=(0, 1, 2))
    path, documents, command = files[kind]
    write_lines(folder / path, *documents)
    spoil(draw, folder / path)
    return Case(command, statuses=(0, 1, 2))


INSPECT = ["kerple_command.py", "inspect", "in/run"]
CONVERT = ["kerple_command.py", "convert"]
CHECKPOINT_FILES = {
    "files of torch": "global_step300/*.pt",
    "manifest": "global_step300/manifest.json",
    "latest": "latest",
    "configuration": "global_step300/configs/*",
}


@functools.cache
def released_run() -> Path:
    """A checkpoint in the layout of the release, with a manifest."""
    folder = base() / "run"
    shutil.copytree(checkpoints("kerple_log"), folder)
    shutil.rmtree(folder / "global_step0")
    write_manifest_of_folder(folder / "global_step300", 300)
    return folder


@functools.cache
def hugging_face() -> Path:
    """A Hugging Face folder with a tokenizer."""
    folder = base() / "hf"
    sizes = {"vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(**sizes, intermediate_size=64, max_position_embeddings=16)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    train_bpe([PYTHON[:20_000]], 300).save(str(folder / "tokenizer.json"))
    return folder


def checkpoint_case(folder: Path, command: list[str]) -> Case:
    """What `kerple inspect`, `convert` and `import-release` do with damaged input; `folder` has the
    input in `in`.
    """
    before = set(os.listdir(folder))

    def problem(status: int, output: str) -> str | None:
        written = (
            {name for name in os.listdir(folder) if not name.startswith(".")}
            - before
            - {"out", "output.log"}
        )
        if written or (status == 2 and (folder / "out").exists()):
            return f"left {sorted(written)} or an output of a failed command"
        if status == 2 and sum(line.startswith("error") for line in output.splitlines()) != 1:
            return "no error of one line"
        return None

    return Case(command, statuses=(0, 1, 2) if command == INSPECT else (0, 2), problem=problem)


def damaged_checkpoint(kind: str, draw: Draw, folder: Path) -> Case:
    """One file of a checkpoint is changed, with a manifest that notices it, or without."""
    run = folder / "in" / "run"
    shutil.copytree(released_run(), run)
    spoil(draw, pick(draw, sorted(run.glob(CHECKPOINT_FILES[kind]))))
    if kind in ("files of torch", "configuration") and draw(st.booleans()):
        (run / "global_step300" / "manifest.json").unlink()
    return checkpoint_case(
        folder, pick(draw, (INSPECT, [*CONVERT, "to-hf", "in/run", "out", "--no-tokenizer"]))
    )


def damaged_archive(draw: Draw, folder: Path) -> Case:
    """An archive of a checkpoint."""
    kind, run = pick(draw, ("zip", "tar", "tar.gz", "tar.xz")), released_run()
    paths = [path for path in sorted(run.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(base())): path.read_bytes() for path in paths}
    content = zip_of(files) if kind == "zip" else tar_of(files, f"w:{kind[4:]}")
    path = folder / "in" / f"release.{kind}"
    path.parent.mkdir()
    path.write_bytes(damage(draw, content))
    return checkpoint_case(folder, ["kerple_command.py", "import-release", str(path), "-o", "out"])


def damaged_hugging_face(draw: Draw, folder: Path) -> Case:
    """A Hugging Face folder, of a model or of its tokenizer."""
    shutil.copytree(hugging_face(), folder / "in" / "hf")
    spoil(
        draw,
        folder / "in" / "hf" / pick(draw, ("model.safetensors", "config.json", "tokenizer.json")),
    )
    return checkpoint_case(folder, [*CONVERT, "from-hf", "in/hf", "out"])


GROUPS: dict[str, MakeCase] = {
    "inputs of preprocessing": damaged_input,
    "datasets (.bin, .idx, manifest)": damaged_dataset,
    "journals of preprocessing": damaged_journal,
    "results, metrics, journals": damaged_result,
    **{
        f"checkpoint: {kind}": functools.partial(damaged_checkpoint, kind)
        for kind in CHECKPOINT_FILES
    },
    "checkpoint: archive": damaged_archive,
    "checkpoint: Hugging Face": damaged_hugging_face,
}
