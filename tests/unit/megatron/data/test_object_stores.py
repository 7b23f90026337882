"""Text from object stores, by the one that fsspec keeps in memory."""

import json
import sys

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron.data.documents import DocumentOptions, read_texts
from megatron.data.indexed_format import check_indexed_files
from megatron.data.input_files import find_files
from megatron.data.prepare import PrepareOptions, prepare
from megatron.data.readers import Corpus
from megatron.utils.errors import UserError
from tests.support.texts import KINDS

TEXTS = [*KINDS.values(), "", "last"]


def read(*inputs, suffixes=(), columns=("text", "meta"), **options) -> list[str]:
    corpus = Corpus(find_files(inputs, suffixes), suffixes, columns)
    return list(read_texts(corpus.chunks(), DocumentOptions(**options)))


def lines_of(*texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def text_of(prefix) -> str:
    return bytes(check_indexed_files(prefix).map_tokens().astype(np.uint8)).decode()


@pytest.fixture
def store():
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pipe("/bucket/pile/00.jsonl.zst", zstandard.compress(lines_of("one", "two")))
    store.pipe("/bucket/pile/01.jsonl", lines_of("three"))
    store.pipe("/bucket/pile/notes.md", b"not read")
    store.pipe("/bucket/tree/a.py", b"source")
    yield store
    store.store.clear()


def test_object_store(store):
    assert read("memory://bucket/pile") == ["one", "two", "three"]
    assert read("memory://bucket/pile/01.jsonl", "memory://bucket/pile/00.jsonl.zst") == ["three", "one", "two"]
    assert read("memory://bucket/pile/*.jsonl") == ["three"]
    assert read("memory://bucket/tree", suffixes=(".py",)) == ["source"]


def test_object_store_parquet(store, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    store.pipe("/bucket/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert read("memory://bucket/a.parquet") == TEXTS


def test_object_store_to_dataset(store, tmp_path, capsys):
    options = PrepareOptions("arxiv", tmp_path, "CharLevelTokenizer", sources=("memory://bucket/pile",))
    assert text_of(prepare(options)) == "one\0two\0three\0"
    prepare(options)
    assert "up to date" in capsys.readouterr().out
    store.pipe("/bucket/pile/01.jsonl", lines_of("other"))
    assert text_of(prepare(options)) == "one\0two\0other\0"


def test_local_files_by_url(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of("text"))
    assert read(f"file://{tmp_path}/a.jsonl") == read(f"local://{tmp_path}") == ["text"]


def test_object_store_errors(store, monkeypatch):
    with pytest.raises(UserError, match=r"input memory://bucket/nothing.jsonl does not exist"):
        find_files(["memory://bucket/nothing.jsonl"])
    with pytest.raises(UserError, match=r"memory://bucket/x\*.jsonl matches no file"):
        find_files(["memory://bucket/x*.jsonl"])
    with pytest.raises(UserError, match=r"fsspec knows no nowhere://"):
        find_files(["nowhere://bucket/a.jsonl"])
    with pytest.raises(UserError, match=r"https://example.org/a.jsonl is to be downloaded first: .*--url https"):
        find_files(["https://example.org/a.jsonl"])
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"reading s3:// needs a package that is not installed: .*s3fs"):
        find_files(["s3://bucket/a.jsonl"])

    def refused(*arguments, **more):
        raise RuntimeError("no credentials\nand much more")

    monkeypatch.setattr(type(store), "info", refused)
    with pytest.raises(UserError, match=r"^cannot read memory://bucket/pile/01.jsonl: no credentials$"):
        find_files(["memory://bucket/pile/01.jsonl"])


def test_object_store_fails_while_read(store, monkeypatch):
    files = find_files(["memory://bucket/pile/01.jsonl"])

    def broken(*arguments, **more):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(type(store), "_open", broken)
    with pytest.raises(UserError, match=r"cannot read memory://.*01.jsonl: connection reset"):
        list(Corpus(files).chunks())
