"""The command lines of tools/datasets, called in this process. (Started as processes in
test_preprocessing.py.)
"""

import json

import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.command_line import run_main
from tests.support.corpora import dataset_text, json_lines
from tests.support.texts import KINDS
from tools.datasets import merge_datasets, preprocess_data, train_tokenizer


@pytest.fixture
def run(capsys):
    """run(script, *arguments) returns the status, the standard output and the standard error of a
    tool.
    """

    def run_script(script, *arguments):
        capsys.readouterr()
        try:
            status = run_main(lambda: script.main([str(argument) for argument in arguments]))
        except SystemExit as exit:  # argparse
            status = exit.code
        output = capsys.readouterr()
        return status, output.out, output.err

    return run_script


def test_train_a_tokenizer_and_preprocess(tmp_path, run):
    """With all options of GPT-NeoX's command line."""
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(json_lines(*KINDS.values()))
    vocab_file = tmp_path / "deep" / "tokenizer.json"
    status, output, error = run(
        train_tokenizer, "--input", texts, "--vocab-size", 600, "--output", vocab_file
    )
    assert (status, output) == (0, f"{vocab_file}: 600 ids\n"), error
    (tmp_path / "more.txt").write_text("one more")
    status, output, error = run(
        preprocess_data,
        *(
            "--input",
            f"{texts},{tmp_path / 'more.txt'}",
            "--output-prefix",
            tmp_path / "out" / "mine",
        ),
        *("--tokenizer-type", "HFTokenizer", "--vocab-file", vocab_file, "--append-eod"),
        *("--workers", 1, "--num-docs", 8, "--dataset-impl", "mmap", "--log-interval", 1),
    )
    assert status == 0, error
    assert "mine_text_document.bin/.idx: 8 documents, " in output
    dataset = IndexedDataset(f"{tmp_path}/out/mine_text_document")
    tokenizer = build_tokenizer("HFTokenizer", vocab_file)
    documents = [tokenizer.detokenize(dataset[number]) for number in range(len(dataset))]
    assert documents == [text + "<|endoftext|>" for text in [*KINDS.values(), "one more"]]


def test_keys_inputs_and_subset(tmp_path, run):
    for name, subset in (("a", "Github"), ("b", "ArXiv")):
        line = {"text": f"text {name}", "title": f"title {name}", "meta": {"pile_set_name": subset}}
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps(line) + "\n" + "broken\n" * (name == "b")
        )
    inputs = ["--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.jsonl"]
    output_options = ["--output-prefix", tmp_path / "x", "--tokenizer-type", "CharLevelTokenizer"]
    status, _, error = run(preprocess_data, *inputs, *output_options)
    assert status == 2
    assert f"error: {tmp_path / 'b.jsonl'}, line 2: not JSON" in error
    assert not list(tmp_path.glob("x*"))
    keys = ["--jsonl-keys", "text", "title", "--pile-subset", "Github", "--bad-documents", "skip"]
    status, output, error = run(preprocess_data, *inputs, *output_options, *keys)
    assert status == 0, error
    assert output.count("skipped: 1 unreadable, 1 of other subsets") == 2
    assert f"skipped: {tmp_path / 'b.jsonl'}, line 2: not JSON" in output
    assert dataset_text(tmp_path / "x_text_document") == "text a"
    assert dataset_text(tmp_path / "x_title_document") == "title a"


@pytest.mark.parametrize(
    ("tool", "arguments", "message"),
    [
        (
            preprocess_data,
            "--input gone --output-prefix x --tokenizer-type CharLevelTokenizer",
            "input gone",
        ),
        (
            preprocess_data,
            "--input a.jsonl --output-prefix x --tokenizer-type TiktokenTokenizer",
            "Tiktoken",
        ),
        (
            preprocess_data,
            "--input a.jsonl --output-prefix x --workers 0 --tokenizer-type X",
            "--workers: ",
        ),
        (
            train_tokenizer,
            "--input a.jsonl --vocab-size 300 --output t.json",
            "nothing to train on",
        ),
        (train_tokenizer, "--input nowhere --vocab-size 300 --output b.txt/t.json", "--output: "),
        (train_tokenizer, "--input nowhere --vocab-size 300 --output .", "--output .: "),
    ],
)
def test_errors(tmp_path, run, monkeypatch, tool, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "b.txt").write_text("text")
    status, _, error = run(tool, *arguments.split())
    assert status == 2
    assert message in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.txt"]


def test_vocabulary_size_that_cannot_be_reached(tmp_path, run):
    (tmp_path / "a.txt").write_text("abab")
    output = tmp_path / "tokenizer.json"
    _, shown, _ = run(
        train_tokenizer, "--input", tmp_path / "a.txt", "--vocab-size", 500, "--output", output
    )
    assert shown == f"{output}: 258 ids, not 500: the text has no more pairs to merge\n"


def test_tokenizer_from_a_part_of_a_source_tree(tmp_path, run):
    for number in range(30):
        (tmp_path / f"{number}.py").write_text(KINDS["python"])
    (tmp_path / "other.txt").write_text("not read")
    output = tmp_path / "tokenizer.json"
    arguments = ["--input", tmp_path, "--suffixes", ".py", "--vocab-size", 300, "--output", output]
    _, shown, error = run(train_tokenizer, *arguments, "--max-megabytes", 0.01)
    assert shown == f"{output}: 300 ids\n", error


def test_tildes_in_paths(tmp_path, run, monkeypatch):
    """Shells expand ~ only at the start of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("more text")
    options = (
        "--input=~/a.txt,~/b.txt",
        "--output-prefix=~/x",
        "--tokenizer-type",
        "CharLevelTokenizer",
    )
    assert run(preprocess_data, *options)[0] == 0
    assert run(preprocess_data, *options, "--output-prefix=~/y")[0] == 0
    assert (
        run(
            merge_datasets,
            "--input",
            "~/x_text_document",
            "~/y_text_document",
            "--output-prefix=~/merged",
        )[0]
        == 0
    )
    assert (
        run(train_tokenizer, "--input=~/a.txt", "--vocab-size=258", "--output=~/tokenizer.json")[0]
        == 0
    )
    assert (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / "merged.bin").stat().st_size > 0
    assert not (tmp_path / "~").exists()


def test_merge(tmp_path, run):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
        arguments = ["--input", tmp_path / f"{name}.txt", "--output-prefix", tmp_path / name]
        run(preprocess_data, *arguments, "--tokenizer-type", "CharLevelTokenizer", "--append-eod")
    prefixes = [tmp_path / "a_text_document", tmp_path / "b_text_document"]
    status, output, error = run(
        merge_datasets, "--input", *prefixes, "--output-prefix", tmp_path / "merged"
    )
    assert status == 0, error
    assert f"{tmp_path / 'merged'}.bin/.idx: 2 documents, " in output
    assert dataset_text(tmp_path / "merged") == "text a\0text b\0"


def test_texts_up_to_a_limit():
    """The text that reaches it is the last one."""
    texts = ["ab", "é", "ef"]
    for megabytes, expected in ((None, 3), (3e-6, 2), (4e-6, 2), (4.1e-6, 3), (1e-9, 1)):
        assert list(train_tokenizer.limit_texts(iter(texts), megabytes)) == texts[:expected]
