"""Preprocessing that was stopped goes on, without losing or doubling a document."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import indexed_writer, preprocessing
from megatron.data import workers as workers_module
from megatron.data.chunks import START, Position
from megatron.data.documents import DocumentOptions
from megatron.data.indexed_writer import IndexedWriter, is_resumable, put_in_place
from megatron.data.input_files import find_files
from megatron.data.preprocessing import preprocess
from megatron.data.readers import Corpus
from megatron.data.workers import TokenizerFiles, tasks
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[4]
CHARACTERS = TokenizerFiles("CharLevelTokenizer")
ENDINGS = ("bin", "idx", "json")

# Runs preprocess_data.py, in small tasks that take a moment and with a commit after each, and kills it twenty times,
# each time up to 0.03 s after it has committed something. It is forked, so that the imports are done once.
KILLED_AGAIN_AND_AGAIN = """
import os, pathlib, random, runpy, signal, sys, time
sys.path.insert(0, ".")
from megatron.data import preprocessing, readers, workers
preprocessing._SECONDS_BETWEEN_COMMITS = 0.0
readers.BLOCK, workers._BYTES_PER_TASK = 2000, 4000
add = preprocessing._add
def slowly(*arguments):
    time.sleep(0.002)
    add(*arguments)
preprocessing._add = slowly
script = "tools/datasets/preprocess_data.py"
journal = pathlib.Path(sys.argv[1])
sys.argv = [script, *sys.argv[2:]]
generator = random.Random(20)
def noted():
    return journal.read_bytes() if journal.exists() else b""
for kill in range(20):
    before = noted()
    child = os.fork()
    if child == 0:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            os._exit(0)
    while noted() == before:
        time.sleep(0.001)
    time.sleep(generator.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "finished before it was killed: nothing was tested"
    print(noted().decode(), flush=True)
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def small_tasks(monkeypatch):
    """A commit after each of many tasks; nothing here depends on how durable a commit is."""
    monkeypatch.setattr(indexed_writer.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(preprocessing, "_SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr("megatron.data.readers.BLOCK", 500)
    monkeypatch.setattr(workers_module, "_BYTES_PER_TASK", 1)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three shards of numbered documents in three formats; some empty, one broken."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = []
    for number in range(900):
        text = "" if number % 50 == 7 else f"document {number} " * (number % 23 + 1)
        lines.append(json.dumps({"text": text, "title": f"title {number}"}).encode() + b"\n")
    lines[456] = b"{broken\n"
    (folder / "a.jsonl").write_bytes(b"".join(lines[:300]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[300:600])))
    (folder / "c.ndjson").write_bytes(b"".join(lines[600:]))
    return folder


OPTIONS = DocumentOptions(keys=("text", "title"), append_eod=True, skip_bad=True)


def make(folder, output, options=OPTIONS, workers=1):
    files = find_files([folder])
    return preprocess(Corpus(files), output, CHARACTERS, options, inputs=[str(folder)], workers=workers)


def result(output) -> dict[str, bytes]:
    """The files of both keys, by the part of their name behind the prefix."""
    names = [f"_{key}_document.{ending}" for key in ("text", "title") for ending in ENDINGS]
    return {name: Path(f"{output}{name}").read_bytes() for name in names}


def stop_after(monkeypatch, calls: int, error: BaseException) -> None:
    """Make the run fail while it hands over its result number `calls`."""
    add, left = preprocessing._add, [calls]

    def failing(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise error
        add(*arguments)

    monkeypatch.setattr(preprocessing, "_add", failing)


@pytest.mark.parametrize("calls", [2, 3, 40, 41, 200])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("no more")], ids=["interrupted", "failed"])
def test_goes_on_where_it_stopped(tmp_path, folder, small_tasks, monkeypatch, capsys, calls, error):
    """Also between the files of two keys (odd numbers of calls)."""
    make(folder, tmp_path / "whole" / "x")
    kept = r"\d+ documents are kept, the same command goes on from there"
    with monkeypatch.context() as patch:
        stop_after(patch, calls, error)
        with pytest.raises(type(error), match=kept):
            make(folder, tmp_path / "out" / "x")
    assert not list((tmp_path / "out").glob("*document.bin"))
    read = []
    original = Corpus.chunks

    def watched(self, start=START):
        read.append(start)
        return original(self, start)

    monkeypatch.setattr(Corpus, "chunks", watched)
    capsys.readouterr()
    make(folder, tmp_path / "out" / "x", workers=2)
    assert "going on behind the " in capsys.readouterr().out
    assert read[0] > START
    assert result(tmp_path / "out" / "x") == result(tmp_path / "whole" / "x")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        f"x{name}" for name in result(tmp_path / "whole" / "x")
    )


def test_killed_at_twenty_random_moments(tmp_path, folder):
    """kill -9, twenty times over one output, each time later than the time before."""
    output = tmp_path / "out"
    for number in range(24):  # the documents many times over, so that a run takes long enough
        os.link(folder / "a.jsonl", folder / f"more{number}.jsonl")
    make(folder, tmp_path / "whole")
    journal = Path(f"{output}.progress.json")
    command = [sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, str(journal), "--input", str(folder)]
    command += ["--output-prefix", str(output), "--jsonl-keys", "text", "title", "--append-eod"]
    command += ["--bad-documents", "skip", "--tokenizer-type", "CharLevelTokenizer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    noted = [json.loads(line)["progress"] for line in done.stdout.splitlines() if line.startswith("{")]
    progress = [state["outputs"][0]["writer"]["documents"] for state in noted]
    assert len(progress) == 20
    assert progress == sorted(progress)
    assert len(set(progress)) > 10
    assert f"going on behind the {progress[-1]:,} documents that are done" in done.stdout
    assert result(output) == result(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name or "progress" in path.name]


@pytest.mark.parametrize("renames", range(4))
def test_killed_while_files_get_their_names(tmp_path, folder, monkeypatch, renames):
    """After each of the four renames (two keys, .bin and .idx): the next run finishes it without reading anything."""
    make(folder, tmp_path / "whole" / "x")
    real, left = Path.replace, [renames]

    def killed(self, target):
        if ".partial.bin" in self.name or ".partial.idx" in self.name:
            if left[0] == 0:
                raise SystemExit("killed")
            left[0] -= 1
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(SystemExit):
            make(folder, tmp_path / "out" / "x")
    monkeypatch.setattr(Corpus, "chunks", lambda self, start=START: pytest.fail("read again"))
    make(folder, tmp_path / "out" / "x")
    assert result(tmp_path / "out" / "x") == result(tmp_path / "whole" / "x")


def interrupted(folder, output, monkeypatch, options=OPTIONS):
    with monkeypatch.context() as patch:
        stop_after(patch, 100, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(folder, output, options)


def test_a_changed_input_or_option_starts_anew(tmp_path, folder, small_tasks, monkeypatch, capsys):
    output = tmp_path / "out"
    interrupted(folder, output, monkeypatch)
    (folder / "a.jsonl").write_text('{"text": "new", "title": "new"}\n')
    capsys.readouterr()
    make(folder, output)
    assert "an unfinished run was of another input; starting anew" in capsys.readouterr().out
    make(folder, tmp_path / "whole")
    assert result(output) == result(tmp_path / "whole")
    interrupted(folder, output, monkeypatch)
    make(folder, output, DocumentOptions(keys=("text", "title"), skip_bad=True))
    assert "of another append_eod; starting anew" in capsys.readouterr().out


def test_output_in_the_folder_of_the_input(folder, small_tasks, monkeypatch, capsys):
    """Neither the unfinished output nor the finished one is taken for input."""
    output = folder / "out"
    interrupted(folder, output, monkeypatch)
    made = make(folder, output)
    assert "going on behind the " in capsys.readouterr().out
    assert make(folder, output) == made


def test_skipping_can_be_asked_for_after_the_fact(tmp_path, folder, small_tasks, capsys):
    """The documents before the bad one are not tokenized again; but those without a bad one left out would be."""
    strict = DocumentOptions(keys=("text", "title"), append_eod=True)
    with pytest.raises(UserError, match=r"b.jsonl.zst, line 157: not JSON.*documents are kept"):
        make(folder, tmp_path / "out", strict)
    make(folder, tmp_path / "out")
    assert "going on behind the" in capsys.readouterr().out
    make(folder, tmp_path / "whole")
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_not_skipping_after_skipping_starts_anew(tmp_path, folder, small_tasks, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 500, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(folder, tmp_path / "out")
    with pytest.raises(UserError, match="line 157: not JSON"):
        make(folder, tmp_path / "out", DocumentOptions(keys=("text", "title"), append_eod=True))
    assert "had left out bad documents; starting anew" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["removed", "cut", "unreadable journal"])
def test_leftovers_that_cannot_be_used(tmp_path, folder, small_tasks, monkeypatch, capsys, damage):
    interrupted(folder, tmp_path / "out", monkeypatch)
    partial = tmp_path / "out_title_document.partial.bin"
    if damage == "removed":
        partial.unlink()
    elif damage == "cut":
        os.truncate(partial, 3)
    else:
        (tmp_path / "out.progress.json").write_text('{"work"')
    make(folder, tmp_path / "out")
    assert "starting anew" in capsys.readouterr().out
    make(folder, tmp_path / "whole")
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_damaged_leftovers_never_pass_for_data(tmp_path, folder, small_tasks, monkeypatch):
    interrupted(folder, tmp_path / "out", monkeypatch)
    partial = tmp_path / "out_text_document.partial.bin"
    content = bytearray(partial.read_bytes())
    content[10] ^= 1
    partial.write_bytes(content)
    with pytest.raises(UserError, match="reads back differently from what was written"):
        make(folder, tmp_path / "out")
    make(folder, tmp_path / "out")  # and the next run is not stuck with it
    make(folder, tmp_path / "whole")
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_full_disk_keeps_what_was_done(tmp_path, folder, small_tasks, monkeypatch):
    calls = [0]
    real = indexed_writer.os.fsync

    def full(descriptor):
        calls[0] += 1
        if calls[0] > 30:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(indexed_writer.os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left on device \(.* documents are kept"):
            make(folder, tmp_path / "out")
    make(folder, tmp_path / "out")
    make(folder, tmp_path / "whole")
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_two_processes_cannot_write_one_output(tmp_path, folder):
    with preprocessing.Journal(tmp_path / "out", {}), pytest.raises(UserError, match="another process is writing"):
        make(folder, tmp_path / "out")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), block=st.integers(20, 400), task=st.integers(1, 900), zipped=st.booleans())
def test_reading_goes_on_at_every_position(tmp_path_factory, data, block, task, zipped):
    """For any cut: what was read before it and what is read after it are the corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        texts = data.draw(st.lists(st.text(max_size=60), max_size=12))
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path = folder / f"{number}.jsonl{'.zst' if zipped else ''}"
        path.write_bytes(zstandard.compress(content) if zipped else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.data.readers.BLOCK", block)
        patch.setattr(workers_module, "_BYTES_PER_TASK", task)
        files = find_files([folder])
        whole = list(tasks(Corpus(files), START))
        cut = data.draw(st.integers(0, len(whole)))
        start = whole[cut - 1].position if cut else START
        rest = list(tasks(Corpus(files), start))
    assert rest == whole[cut:]
    assert start <= Position(len(files))


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=8),
    committed=st.data(),
    lost=st.integers(0, 3),
)
def test_a_writer_taken_up_again(tmp_path_factory, pieces, committed, lost):
    """Commit after any piece, write some more that is lost, go on in another writer: the bytes of one writer."""
    import numpy as np

    folder = tmp_path_factory.mktemp("writer")
    arrays = [(np.repeat(np.array(piece, np.uint16), piece), np.array(piece, np.int32)) for piece in pieces]
    if not sum(map(sum, pieces)):
        return
    with IndexedWriter(folder / "whole", 10) as writer:
        for piece in arrays:
            writer.add(*piece)
        expected = writer.finish()
    cut = committed.draw(st.integers(0, len(pieces)))
    first = IndexedWriter(folder / "out", 10)
    for piece in arrays[:cut]:
        first.add(*piece)
    state = first.commit()
    for piece in arrays[cut : cut + lost]:
        first.add(*piece)
    first.suspend()
    assert is_resumable(folder / "out", 10, state)
    with IndexedWriter(folder / "out", 10, state) as second:
        for piece in arrays[cut:]:
            second.add(*piece)
        written = second.seal()
        put_in_place(folder / "out")
        second.suspend()
    assert (written.sha256, written.documents) == (expected.sha256, expected.documents)
    for ending in ("bin", "idx"):
        assert (folder / f"out.{ending}").read_bytes() == (folder / f"whole.{ending}").read_bytes()


def test_stopped_with_tasks_in_flight(tmp_path, folder, small_tasks, monkeypatch):
    """What other workers had done or begun when the run stopped is done again, once."""
    make(folder, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 121, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt, match="documents are kept"):
            make(folder, tmp_path / "out", workers=3)
    make(folder, tmp_path / "out")
    assert result(tmp_path / "out") == result(tmp_path / "whole")
