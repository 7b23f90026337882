"""From text files to .bin/.idx: round trip, independence of the number of workers, and resuming."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data.indexed_dataset import open_indexed_files, read_manifest
from megatron.preparation import encoding, preprocessing, readers
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.preparation.input_files import find_files
from megatron.preparation.own_text import OwnText
from megatron.preparation.preprocessing import Journal, preprocess, summary
from megatron.preparation.readers import START, FileCorpus
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError
from tests.support.corpora import BYTE_TOKENIZER, dataset_text, json_lines
from tests.support.errors import assert_rejected


@pytest.fixture
def shard(tmp_path, documents) -> Path:
    path = tmp_path / "shard.jsonl"
    with open(path, "w", encoding="utf-8") as stream:
        for number, text in enumerate(documents):
            record = {"text": text, "title": f"number {number}"}
            stream.write(json.dumps(record, ensure_ascii=number % 2 == 0) + "\n")
    return path


def run(path, output, tokenizer_files=BYTE_TOKENIZER, workers=1, **options):
    corpus = FileCorpus(find_files([path]))
    return preprocess(
        corpus,
        output,
        tokenizer_files,
        DocumentOptions(**options),
        workers=workers,
        inputs=[str(path)],
    )


def test_round_trip(tmp_path, shard, documents, tokenizer_file, tokenizer):
    """megatron-core reads the documents that were written."""
    manifest = run(
        shard, tmp_path / "out", TokenizerFiles("HFTokenizer", str(tokenizer_file)), append_eod=True
    )["text"]
    prefix = tmp_path / "out_text_document"
    dataset = IndexedDataset(str(prefix))
    nonempty = [text for text in documents if text]
    assert len(dataset) == len(nonempty) == manifest.documents
    for ids, text in zip(
        (dataset[number] for number in range(len(dataset))), nonempty, strict=True
    ):
        assert ids[-1] == tokenizer.eod
        assert tokenizer.detokenize(ids[:-1]) == text
    assert manifest.skipped_empty == len(documents) - len(nonempty) > 0
    assert manifest.text_bytes == sum(len(text.encode()) for text in documents)
    assert manifest.tokens == sum(dataset.sequence_lengths)
    assert manifest.largest_id == int(open_indexed_files(prefix).open_tokens()[:].max())
    assert manifest == read_manifest(prefix)
    assert f"{manifest.documents:,} documents" in summary(prefix, manifest)
    assert f"skipped: {manifest.skipped_empty:,} empty" in summary(prefix, manifest)


def test_output_does_not_depend_on_workers(tmp_path, shard, tokenizer_file, monkeypatch):
    monkeypatch.setattr(encoding, "WORK_ITEM_BYTES", 1)
    monkeypatch.setattr(readers, "BLOCK", 10000)
    files = TokenizerFiles("HFTokenizer", str(tokenizer_file))
    one = run(shard, tmp_path / "one", files, append_eod=True)
    assert run(shard, tmp_path / "several", files, workers=3, append_eod=True) == one
    for extension in ("bin", "idx", "json"):
        one, several = (
            tmp_path / f"{name}_text_document.{extension}" for name in ("one", "several")
        )
        assert one.read_bytes() == several.read_bytes()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            b'{"text": "x", "meta": {"pile_set_name": "ArXiv"}}\n',
            {"subset": "Github"},
            "Github.*ArXiv.*1",
        ),
        (
            b'broken\n\n[]\n{"text": ""}\n',
            {"skip_bad": True},
            "no text to write: 2 .*unreadable, 1 .*empty; .*, line 1: not",
        ),
    ],
)
def test_input_without_documents(tmp_path, content, options, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert_rejected(message, run, tmp_path / "a.jsonl", tmp_path / "out", **options)


def test_a_character_that_ends_documents(tmp_path):
    """NUL, for CharLevelTokenizer only; not if ftfy removes it."""
    (tmp_path / "a.jsonl").write_bytes(json_lines("one", "two\0 halves", "three"))
    message = r"a\.jsonl, line 2: character 3 is '\\x00'"
    assert_rejected(message, run, tmp_path / "a.jsonl", tmp_path / "out")
    manifest = run(tmp_path / "a.jsonl", tmp_path / "out", append_eod=True, skip_bad=True)["text"]
    assert manifest.skipped_bad == 1
    assert dataset_text(tmp_path / "out_text_document") == "one\0three\0"


def test_failure_keeps_the_previous_output(tmp_path, shard):
    run(shard, tmp_path / "out", skip_bad=True)
    before = {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("out")
    }
    assert len(before) == 3
    shard.write_text("broken\n")
    assert_rejected("not JSON", run, shard, tmp_path / "out")
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("out")
    } == before


def test_ftfy(tmp_path, shard, monkeypatch):
    fake = SimpleNamespace(fix_text=lambda text: text.replace("â€™", "'"), __spec__=object())
    monkeypatch.setitem(sys.modules, "ftfy", fake)
    (tmp_path / "a.txt").write_text("itâ€™s", encoding="utf-8")
    manifest = run(tmp_path / "a.txt", tmp_path / "out", ftfy=True)["text"]
    assert manifest.ftfy
    assert dataset_text(tmp_path / "out_text_document") == "it's"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_rejected("--ftfy", run, shard, tmp_path / "out", ftfy=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_size_limit(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(encoding, "WORK_ITEM_BYTES", 1)
    monkeypatch.setattr(readers, "BLOCK", 300)
    texts = [f"{number:02}" * 100 for number in range(20)]
    (tmp_path / "a.jsonl").write_bytes(json_lines(*texts))
    corpus = FileCorpus(find_files([tmp_path / "a.jsonl"]))
    manifest = preprocess(
        corpus,
        tmp_path / "out",
        BYTE_TOKENIZER,
        DocumentOptions(append_eod=True),
        workers=workers,
        limit_mb=0.0019,
    )["text"]
    assert 1900 <= manifest.text_bytes <= 1900 + 2 * 200  # a block has at most two documents
    expected = "".join(f"{text}\0" for text in texts[: manifest.documents])
    assert dataset_text(tmp_path / "out_text_document") == expected


# --- resuming


@pytest.fixture
def small_items(monkeypatch):
    """Many small work items, with a commit after each."""
    monkeypatch.setattr(preprocessing, "COMMIT_INTERVAL_SECONDS", 0.0)
    monkeypatch.setattr(readers, "BLOCK", 500)
    monkeypatch.setattr(encoding, "WORK_ITEM_BYTES", 1)


OPTIONS = DocumentOptions(keys=("text", "title"), append_eod=True, skip_bad=True)
STRICT_OPTIONS = DocumentOptions(keys=("text", "title"), append_eod=True)


def build(folder, output, options=OPTIONS, workers=1):
    return preprocess(
        FileCorpus(find_files([folder])),
        output,
        BYTE_TOKENIZER,
        options,
        inputs=["input"],
        workers=workers,
    )


def contents(output) -> dict[str, bytes]:
    """The output files of both keys, by the part of their names after the prefix."""
    names = [
        f"_{key}_document.{extension}"
        for key in ("text", "title")
        for extension in ("bin", "idx", "json")
    ]
    return {name: Path(f"{output}{name}").read_bytes() for name in names}


@pytest.fixture(scope="module")
def shared_input(tmp_path_factory) -> Path:
    """Three shards of numbered documents in three formats. Some documents are empty, and one is not
    JSON.
    """
    folder = tmp_path_factory.mktemp("resuming") / "in"
    folder.mkdir()
    lines = []
    for number in range(300):
        text = "" if number % 50 == 7 else f"document {number} " * (number % 23 + 1)
        lines.append(json.dumps({"text": text, "title": f"title {number}"}).encode() + b"\n")
    lines[156] = b"{broken\n"
    (folder / "a.jsonl").write_bytes(b"".join(lines[:100]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[100:200])))
    (folder / "c.ndjson").write_bytes(b"".join(lines[200:]))
    return folder


@pytest.fixture(scope="module")
def expected(shared_input) -> dict[str, bytes]:
    """The output of an uninterrupted run."""
    build(shared_input, shared_input.parent / "expected")
    return contents(shared_input.parent / "expected")


@pytest.fixture
def folder(tmp_path, shared_input) -> Path:
    """A copy of the input, for tests that write to it."""
    (tmp_path / "in").mkdir()
    for path in shared_input.iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "in"


def interrupt(
    folder, output, monkeypatch, *, calls=60, error=None, options=OPTIONS, workers=1
) -> str:
    """Run until a writer's `add` has been called `calls` times. Returns the message of the
    interruption.

    There are two writers, so an odd number of calls stops between the outputs of the two keys.
    """
    error = error or KeyboardInterrupt()
    add = IndexedWriter.add
    remaining = [calls]

    def add_or_fail(*arguments):
        remaining[0] -= 1
        if remaining[0] < 0:
            raise error
        add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add", add_or_fail)
        with pytest.raises(type(error)) as raised:
            build(folder, output, options, workers)
    return str(raised.value)


@pytest.mark.parametrize("calls", [2, 81])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), UserError("stop")], ids=["interrupted", "failed"]
)
def test_resume(tmp_path, shared_input, expected, small_items, monkeypatch, capsys, calls, error):
    output = tmp_path / "out" / "x"
    message = interrupt(shared_input, output, monkeypatch, calls=calls, error=error)
    assert "documents are saved; the same command resumes" in message
    assert not list((tmp_path / "out").glob("*document.bin"))
    starts = []
    read_chunks = FileCorpus.chunks

    def recording_chunks(self, start=START):
        starts.append(start)
        return read_chunks(self, start)

    monkeypatch.setattr(FileCorpus, "chunks", recording_chunks)
    capsys.readouterr()
    build(shared_input, output)
    assert "x: resuming after " in capsys.readouterr().out
    assert starts[0] > START
    assert contents(output) == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        f"x{name}" for name in expected
    )


@pytest.mark.parametrize("limit_mb", [None, 0.001])
def test_failures_after_the_last_document(tmp_path, small_items, monkeypatch, limit_mb):
    """With the documents of a list, or up to a limit of files, no document is written again or
    lost.
    """
    (tmp_path / "a.jsonl").write_bytes(json_lines(*(f"document {number}" for number in range(100))))

    def run(name):
        files = FileCorpus(find_files([tmp_path / "a.jsonl"]))
        corpus = OwnText(files, DocumentOptions()) if limit_mb is None else files
        preprocess(corpus, tmp_path / name, BYTE_TOKENIZER, DocumentOptions(), limit_mb=limit_mb)
        return dataset_text(tmp_path / f"{name}_text_document")

    def fail(writer):
        raise UserError("the disk is full")

    expected = run("whole")
    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "finalize", fail)
        for _ in range(3):
            assert_rejected("the same command resumes", run, "failed")
    assert run("failed") == expected


@pytest.mark.ci
def test_resume_with_workers(tmp_path, shared_input, expected, small_items, monkeypatch):
    """Work items in flight at the interruption are processed again, once."""
    assert "are saved" in interrupt(
        shared_input, tmp_path / "out", monkeypatch, calls=41, workers=2
    )
    build(shared_input, tmp_path / "out", workers=2)
    assert contents(tmp_path / "out") == expected


def kill_during_publishing(folder, output, monkeypatch, renames) -> None:
    """Run until `renames` files have their final names."""
    rename, remaining = Path.replace, [renames]

    def rename_or_exit(self, target):
        if ".partial.bin" in self.name or ".partial.idx" in self.name:
            if remaining[0] == 0:
                raise SystemExit("killed")
            remaining[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", rename_or_exit)
        with pytest.raises(SystemExit):
            build(folder, output)


@pytest.mark.parametrize("renames", range(4))
def test_killed_during_publishing(tmp_path, shared_input, expected, monkeypatch, renames):
    """After any of the four renames (two keys, .bin and .idx), the next run publishes without
    reading the input.
    """
    kill_during_publishing(shared_input, tmp_path / "x", monkeypatch, renames)
    monkeypatch.setattr(
        FileCorpus, "chunks", lambda self, start=START: pytest.fail("the input was read again")
    )
    build(shared_input, tmp_path / "x")
    assert contents(tmp_path / "x") == expected


def test_changed_input_or_options_start_from_the_beginning(
    tmp_path, folder, small_items, monkeypatch, capsys
):
    output = tmp_path / "out"
    interrupt(folder, output, monkeypatch)
    (folder / "a.jsonl").write_text('{"text": "new", "title": "new"}\n')
    capsys.readouterr()
    build(folder, output)
    assert (
        "out.progress.json: journal ignored: input changed; starting from the beginning"
        in capsys.readouterr().out
    )
    build(folder, tmp_path / "second")
    assert contents(output) == contents(tmp_path / "second")
    interrupt(folder, output, monkeypatch)
    build(folder, output, DocumentOptions(keys=("text", "title"), skip_bad=True))
    assert "journal ignored: append_eod changed" in capsys.readouterr().out


def test_output_in_the_input_folder(folder, small_items, monkeypatch, capsys):
    """Neither unfinished nor finished output is read as input."""
    output = folder / "out"
    interrupt(folder, output, monkeypatch)
    manifests = build(folder, output)
    assert "resuming after " in capsys.readouterr().out
    assert build(folder, output) == manifests


def test_resume_with_skip_bad_after_a_bad_document(
    tmp_path, shared_input, expected, small_items, capsys
):
    assert_rejected(
        r"b\.jsonl\.zst.*57.*JSON", build, shared_input, tmp_path / "out", STRICT_OPTIONS
    )
    build(shared_input, tmp_path / "out")
    assert "resuming after " in capsys.readouterr().out
    assert contents(tmp_path / "out") == expected


def exchange_lengths(path):
    """Exchange the first two different lengths, so that their sum stays the same."""
    lengths = np.fromfile(path, np.int32)
    other = np.flatnonzero(lengths != lengths[0])[0]
    lengths[[0, other]] = lengths[[other, 0]]
    lengths.tofile(path)


def test_no_resume_without_skip_bad_after_skipping(
    tmp_path, shared_input, small_items, monkeypatch, capsys
):
    interrupt(shared_input, tmp_path / "out", monkeypatch, calls=150)
    kill_during_publishing(shared_input, tmp_path / "complete", monkeypatch, 0)
    for name in ("out", "complete"):
        assert_rejected("line 57: not JSON", build, shared_input, tmp_path / name, STRICT_OPTIONS)
        assert (
            "journal ignored: the earlier run skipped bad documents; starting from"
            in capsys.readouterr().out
        )


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("out_title_document.partial.bin", Path.unlink),
        ("out_title_document.partial.bin", lambda path: os.truncate(path, 3)),
        (
            "out_text_document.partial.bin",
            lambda path: path.write_bytes(bytes(path.stat().st_size)),
        ),
        ("out_text_document.partial.lengths", exchange_lengths),
        ("out.progress.json", lambda path: path.write_bytes(b'{"work"')),
        (
            "out.progress.json",
            lambda path: path.write_text(
                path.read_text().replace('"position": [0', '"position": [1')
            ),
        ),
    ],
    ids=["removed", "truncated", "zeros", "exchanged", "unreadable journal", "edited journal"],
)
def test_unusable_files_of_an_unfinished_run(
    tmp_path, shared_input, expected, small_items, monkeypatch, capsys, name, damage
):
    interrupt(shared_input, tmp_path / "out", monkeypatch)
    damage(tmp_path / name)
    build(shared_input, tmp_path / "out")
    assert "starting from the beginning" in capsys.readouterr().out
    assert contents(tmp_path / "out") == expected


def test_concurrent_runs_are_rejected(tmp_path, shared_input):
    with (
        Journal(tmp_path / "out", {}),
        pytest.raises(UserError, match="another process is writing"),
    ):
        build(shared_input, tmp_path / "out")
