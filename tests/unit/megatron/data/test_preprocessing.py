"""From files to .bin/.idx: round trip, independence of the number of workers, interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.data import preprocessing
from megatron.data import workers as workers_module
from megatron.data.documents import DocumentOptions
from megatron.data.indexed_format import check_indexed_files
from megatron.data.input_files import find_files
from megatron.data.manifest import largest_id, manifest_path, read_manifest
from megatron.data.preprocessing import preprocess, summary
from megatron.data.readers import Corpus
from megatron.data.workers import TokenizerFiles
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[4]
CHARACTERS = TokenizerFiles("CharLevelTokenizer")


@pytest.fixture
def shard(tmp_path, documents) -> Path:
    path = tmp_path / "shard.jsonl"
    with open(path, "w", encoding="utf-8") as stream:
        for number, text in enumerate(documents):
            stream.write(json.dumps({"text": text, "title": f"number {number}"}, ensure_ascii=number % 2 == 0) + "\n")
    return path


def run(path, output, files, workers=1, **options):
    corpus = Corpus(find_files([path]))
    return preprocess(corpus, output, files, DocumentOptions(**options), workers=workers, inputs=[str(path)])


def test_round_trip(tmp_path, shard, documents, tokenizer_file, tokenizer):
    """What megatron-core reads, decoded, is the input."""
    files = TokenizerFiles("HFTokenizer", str(tokenizer_file))
    manifest = run(shard, tmp_path / "out", files, append_eod=True)["text"]
    dataset = IndexedDataset(str(tmp_path / "out_text_document"))
    kept = [text for text in documents if text]
    assert len(dataset) == len(kept) == manifest.documents
    for ids, text in zip((dataset[number] for number in range(len(dataset))), kept, strict=True):
        assert ids[-1] == tokenizer.eod
        assert tokenizer.detokenize(ids[:-1]) == text
    assert manifest.skipped_empty == len(documents) - len(kept) > 0
    assert manifest.text_bytes == sum(len(text.encode()) for text in documents)
    assert manifest.tokens == sum(dataset.sequence_lengths)
    assert manifest == read_manifest(tmp_path / "out_text_document")
    assert f"{manifest.documents:,} documents" in summary(tmp_path / "out_text_document", manifest)
    assert f"{manifest.skipped_empty:,} empty" in summary(tmp_path / "out_text_document", manifest)


@pytest.mark.parametrize("workers", [2, 4])
def test_workers_make_no_difference(tmp_path, shard, tokenizer_file, workers, monkeypatch):
    monkeypatch.setattr(workers_module, "_BYTES_PER_TASK", 1)
    monkeypatch.setattr("megatron.data.readers.BLOCK", 10000)
    files = TokenizerFiles("HFTokenizer", str(tokenizer_file))
    alone = run(shard, tmp_path / "alone", files, append_eod=True)
    several = run(shard, tmp_path / "several", files, workers, append_eod=True)
    assert alone == several
    for ending in ("bin", "idx", "json"):
        first, second = tmp_path / f"alone_text_document.{ending}", tmp_path / f"several_text_document.{ending}"
        assert first.read_bytes() == second.read_bytes()


def test_several_keys(tmp_path, shard, documents):
    manifests = run(shard, tmp_path / "out", CHARACTERS, keys=("title", "text"))
    assert list(manifests) == ["title", "text"]
    titles = check_indexed_files(tmp_path / "out_title_document")
    assert bytes(titles.map_tokens().astype(np.uint8)).decode() == "".join(
        f"number {number}" for number in range(len(documents))
    )
    assert check_indexed_files(tmp_path / "out_text_document").documents == sum(map(bool, documents))


def test_bad_document(tmp_path, shard, capsys):
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join([*lines[:100], b"{broken\n", *lines[100:]]))
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"shard.jsonl, line 101: not JSON.*--bad-documents skip"):
            run(shard, tmp_path / "out", CHARACTERS, workers)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["shard.jsonl"]
    manifest = run(shard, tmp_path / "out", CHARACTERS, skip_bad=True)["text"]
    assert manifest.skipped_bad == 1
    assert "1 unreadable" in summary(tmp_path / "out_text_document", manifest)
    assert "left out: " + str(shard) + ", line 101" in capsys.readouterr().out


def test_subset_that_is_not_there(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x", "meta": {"pile_set_name": "ArXiv"}}\n')
    with pytest.raises(UserError, match=r"no documents of subset Github; its subsets: ArXiv \(1\)"):
        run(tmp_path / "a.jsonl", tmp_path / "out", CHARACTERS, subset="Github")


def test_no_text_at_all(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"nothing to write to .*out_text_document.bin: the input holds no text"):
        run(tmp_path / "a.jsonl", tmp_path / "out", CHARACTERS, append_eod=True)


def test_failure_keeps_what_was_there(tmp_path, shard):
    run(shard, tmp_path / "out", CHARACTERS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("out")}
    assert len(before) == 3
    shard.write_text("broken\n")
    with pytest.raises(UserError, match="not JSON"):
        run(shard, tmp_path / "out", CHARACTERS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("out")} == before


def test_ftfy(tmp_path, monkeypatch):
    mender = SimpleNamespace(fix_text=lambda text: text.replace("â€™", "'"), __spec__=object())
    monkeypatch.setitem(sys.modules, "ftfy", mender)
    (tmp_path / "a.txt").write_text("itâ€™s", encoding="utf-8")
    manifest = run(tmp_path / "a.txt", tmp_path / "out", CHARACTERS, ftfy=True)["text"]
    assert manifest.ftfy
    assert (tmp_path / "out_text_document.bin").read_bytes() == "it's".encode("utf-16-le")


def test_ftfy_absent(tmp_path, shard, monkeypatch):
    monkeypatch.setattr(preprocessing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="--ftfy needs the package ftfy, which is not installed: pip install ftfy"):
        run(shard, tmp_path / "out", CHARACTERS, ftfy=True)


def test_no_workers(tmp_path, shard):
    with pytest.raises(UserError, match="workers is 0; it must be at least 1"):
        run(shard, tmp_path / "out", CHARACTERS, workers=0)


def test_manifest_is_optional_and_never_trusted_for_other_files(tmp_path, shard, write_corpus):
    manifest = run(shard, tmp_path / "out", CHARACTERS)["text"]
    prefix = tmp_path / "out_text_document"
    files = check_indexed_files(prefix)
    assert largest_id(files, 0, files.sequences) == manifest.largest_id == int(files.map_tokens().max())
    manifest_path(prefix).write_text('{"documents": 3}')
    assert read_manifest(prefix) is None
    assert largest_id(files, 0, 1) == int(files.map_tokens()[: files.lengths[0]].max())
    run(shard, tmp_path / "out", CHARACTERS)
    write_corpus(prefix, [5], vocab_size=900, seed=3)  # with the manifest of the other files still beside it
    files = check_indexed_files(prefix)
    assert largest_id(files, 0, 1) == int(files.map_tokens().max())
    manifest = run(shard, tmp_path / "out", CHARACTERS)["text"]
    files = check_indexed_files(prefix)
    tokens = files.map_tokens() * 0 + 7
    tokens.tofile(f"{prefix}.bin")  # as many others, by software that writes no manifest
    later = manifest_path(prefix).stat().st_mtime_ns + 1
    os.utime(f"{prefix}.bin", ns=(later, later))
    assert largest_id(files, 0, files.sequences) == 7 < manifest.largest_id


def test_negative_ids_count_as_beyond_every_vocabulary(tmp_path):
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    builder.add_document(torch.tensor([5, -1, 3]), [3])
    builder.finalize(str(tmp_path / "a.idx"))
    assert largest_id(check_indexed_files(tmp_path / "a"), 0, 1) == 2**32 - 1


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted(tmp_path, how):
    """Nothing under the final name, no worker left behind, and the next run succeeds."""
    large = tmp_path / "large.jsonl"
    large.write_bytes((b'{"text": "' + b"x" * 4000 + b'"}\n') * 20000)
    command = [sys.executable, "tools/datasets/preprocess_data.py", "--input", str(large), "--output-prefix"]
    command += [str(tmp_path / "out"), "--tokenizer-type", "CharLevelTokenizer", "--workers", "2"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        written = tmp_path / "out_text_document.partial.bin"
        deadline = time.monotonic() + 60
        while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        assert process.wait(60) != 0
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(("document.bin", "document.idx"))]
    if how == signal.SIGINT:
        assert [path.name for path in tmp_path.iterdir()] == ["large.jsonl"]
    (tmp_path / "small.txt").write_text("text")
    run(tmp_path / "small.txt", tmp_path / "out", CHARACTERS)
    assert check_indexed_files(tmp_path / "out_text_document").tokens == 4


def test_a_killed_worker_is_told_of(tmp_path, shard, monkeypatch):
    real = workers_module.ProcessPoolExecutor

    def with_a_victim(*arguments):
        executor = real(*arguments)
        executor.submit(abs, -1).result()
        next(iter(executor._processes.values())).kill()
        return executor

    monkeypatch.setattr(workers_module, "ProcessPoolExecutor", with_a_victim)
    with pytest.raises(UserError, match="a worker process died, most likely killed for want of memory"):
        run(shard, tmp_path / "out", CHARACTERS, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.jsonl"]
