"""The user's own text."""

import gzip
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data.indexed_dataset import open_indexed_files
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.input_files import find_files
from megatron.preparation.own_text import OwnText
from megatron.preparation.prepare import PrepareOptions, prepare
from megatron.preparation.readers import FileCorpus
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.errors import assert_rejected

BOOK = "".join(
    f"Paragraph {number}.\n" + "Some words of a long book. " * 30 + "\n\n" for number in range(200)
)


def corpus(*paths, limit_mb=None, ftfy=False) -> OwnText:
    return OwnText(FileCorpus(find_files(paths)), DocumentOptions(ftfy=ftfy), limit_mb)


@pytest.fixture
def folder(tmp_path):
    """A book and notes in several formats, with a file that is no text."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.md").write_text(BOOK)
    (tmp_path / "text" / "notes.rst").write_text("Notes\n=====\n")
    (tmp_path / "text" / "more.jsonl").write_text('{"text": "a note"}\n{"text": " "}\n')
    (tmp_path / "text" / "picture.png").write_bytes(bytes(100))
    return tmp_path / "text"


def test_documents(folder, capsys):
    documents = corpus(folder).documents
    texts = [text.decode() for _, text in documents]
    assert [name for name, _ in documents] == sorted(name for name, _ in documents)
    pieces = [text for text in texts if text not in ("a note", "Notes\n=====\n")]
    assert len(pieces) == len(texts) - 2
    assert "".join(sorted(pieces, key=lambda text: int(text.split()[1].rstrip(".")))) == BOOK
    assert max(map(len, pieces)) <= 4000
    assert all(piece.startswith("Paragraph") for piece in pieces)
    captured = capsys.readouterr()
    assert f"documents of more than 4,000 bytes: 1, divided into {len(pieces)}" in captured.out
    assert "without text: 1" in captured.out
    assert "skipped 1 file: hidden, named README or of other types (1 .png)" in captured.err


def test_too_little_text_is_a_note(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 10)
    assert len(corpus(tmp_path).documents) == 1
    assert (
        "note: 50 bytes of text in 1 documents is too little for training"
        in capsys.readouterr().out
    )


def test_identity(folder):
    identity = corpus(folder).identity()
    assert corpus(folder).identity() == identity
    assert len({corpus(folder, limit_mb=limit).identity() for limit in (None, 0.01, 0.02)}) == 3
    (folder / "notes.rst").write_text("Other notes\n")
    assert corpus(folder).identity() != identity


def test_tokenizer_sees_the_training_split_only(folder):
    text = corpus(folder)
    documents = [content.decode() for _, content in text.documents]
    assert text.tokenizer_texts() == documents[: round(0.8 * len(documents))]


def test_prepare(folder, tmp_path, capsys):
    options = PrepareOptions("mytext", tmp_path / "data", sources=(str(folder),))
    prefix = prepare(options)
    assert prefix == tmp_path / "data" / "mytext" / "mytext_text_document"
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    files = open_indexed_files(prefix)
    texts = [
        tokenizer.detokenize(ids) for ids in np.split(files.open_tokens()[:], files.offsets()[1:-1])
    ]
    expected = [text.decode() for _, text in corpus(folder).documents]
    assert [text.removesuffix("<|endoftext|>") for text in texts] == expected
    assert 257 < tokenizer.vocab_size <= 1024
    capsys.readouterr()
    prepare(options)
    assert capsys.readouterr().out == f"{prefix}: up to date\n"


def test_the_manifest_counts_skipped_documents(tmp_path):
    """Also those that are left out before anything is tokenized."""
    lines = ['{"text": "a note"}', *['{"text": " \\n"}'] * 4, "no JSON", '{"no text": 1}']
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    source = str(tmp_path / "notes.jsonl")
    for keys in ({}, {"tokenizer_type": "CharLevelTokenizer"}):
        options = PrepareOptions(
            "mytext", tmp_path / "data", sources=(source,), skip_bad=True, rebuild=True, **keys
        )
        manifest = open_indexed_files(prepare(options)).manifest
        assert manifest.documents == 1
        assert (manifest.skipped_empty, manifest.skipped_bad) == (4, 2)


def test_the_size_of_the_tokenizer_is_that_of_the_text(tmp_path, monkeypatch):
    """Compressed or not, and without the overhead of JSON."""
    text = "".join(f"{number * 7919 % 104729} words\n" for number in range(900))
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write(text)
    lines = [json.dumps({"text": line, "meta": "x" * 300}) for line in text.splitlines()]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    limits = ((len(text) / 2, 260), (len(text) + 1, 300), (float("inf"), 400))
    monkeypatch.setattr("megatron.preparation.own_text.VOCAB_SIZES", limits)
    sizes = [corpus(tmp_path / name).vocab_size for name in ("a.txt", "b.txt.gz", "c.jsonl")]
    assert sizes == [300, 300, 300]


def test_limit(folder, tmp_path, monkeypatch):
    """The tokenizer sees only the training split of the limited text, after its repair by ftfy."""
    fake = SimpleNamespace(fix_text=lambda text: text.replace("words", "text"), __spec__=object())
    monkeypatch.setitem(sys.modules, "ftfy", fake)
    everything = corpus(folder, ftfy=True).documents
    limited = corpus(folder, limit_mb=0.05, ftfy=True).documents
    assert limited == everything[: len(limited)]
    sizes = [len(text) for _, text in limited]
    assert sum(sizes[:-1]) < 50_000 <= sum(sizes)
    trained_on = []

    def train(texts, *arguments, **keywords):
        trained_on.extend(texts)
        return train_bpe(texts, *arguments, **keywords)

    monkeypatch.setattr("megatron.preparation.prepare.train_bpe", train)
    prefix = prepare(
        PrepareOptions(
            "mytext", tmp_path / "data", sources=(str(folder),), limit_mb=0.05, ftfy=True
        )
    )
    assert open_indexed_files(prefix).documents == len(limited)
    assert trained_on == [text.decode() for _, text in limited[: round(0.8 * len(limited))]]


def test_errors(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    options = PrepareOptions("mytext", tmp_path / "data", sources=(str(tmp_path / "empty.txt"),))
    assert_rejected(r"empty\.txt", prepare, options)
    assert_rejected(r"'\.\./up'", prepare, replace(options, dataset="../up"))
    (tmp_path / "empty.txt").write_bytes(b"good\n" * 1000 + b"\xff")
    assert_rejected(r"empty\.txt.*1001", prepare, options)
