"""Text from trees of source files, from tables, and from archives that mean ill."""

import io
import json
import sys
import tarfile
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.chunks import Position
from megatron.data.documents import DocumentOptions, read_texts
from megatron.data.hub import HubCorpus
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


# Trees of source files.


@pytest.fixture
def tree(tmp_path):
    tree = tmp_path / "tree"
    for name in ("a.c", "deep/b.h", "deep/er/c.c", "README", "x.py", "data.json", ".hidden/d.c"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "link.c").symlink_to("a.c")
    return tree


def test_tree_of_sources(tree):
    names = read(tree, suffixes=(".c", ".h"))
    assert sorted(names) == [".hidden/d.c", "a.c", "deep/b.h", "deep/er/c.c"]
    assert names != sorted(names)  # the parts of a split must not differ in kind
    assert names == read(tree, suffixes=(".h", ".c"))


def test_tar_of_sources(tmp_path, tree):
    with tarfile.open(tmp_path / "tree.tar.xz", "w:xz") as archive:
        archive.add(tree, "linux")
    assert sorted(read(tmp_path / "tree.tar.xz", suffixes=(".c", ".h"))) == [
        *(".hidden/d.c", "a.c", "deep/b.h", "deep/er/c.c")
    ]
    with zipfile.ZipFile(tmp_path / "tree.zip", "w") as archive:
        archive.writestr("a.py", "source")
        archive.writestr("b.png", b"\x89PNG")
    assert read(tmp_path / "tree.zip", suffixes=(".py",)) == ["source"]


def test_github_from_a_tree(tmp_path, tree):
    options = PrepareOptions("github", tmp_path, "CharLevelTokenizer", sources=(str(tree),), suffixes=(".py",))
    assert text_of(prepare(options)) == "x.py\0"


@pytest.mark.parametrize("suffix", ["c", ".", "*.c", ".tar.gz", "./c"])
def test_suffixes_that_are_none(tree, suffix):
    with pytest.raises(UserError, match="is not an ending with its dot"):
        find_files([tree], (suffix,))


def test_tree_without_such_files(tree):
    with pytest.raises(UserError, match=r"holds no file whose name ends in .rs or .go"):
        find_files([tree], (".rs", ".go"))
    with pytest.raises(UserError, match=r"data.json is of no kind read here: a folder or an archive, or a file"):
        find_files([tree / "data.json"], (".c",))


# Archives that mean ill: nothing is ever written, and links lead nowhere.


def test_links_and_devices_in_a_tar_are_passed_over(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "soft.txt"), (tarfile.LNKTYPE, "hard.txt"), (tarfile.CHRTYPE, "null.txt")):
            header = tarfile.TarInfo(name)
            header.type, header.linkname = kind, str(secret)
            archive.addfile(header)
        for name in ("../../up.txt", "/etc/absolute.txt", "ordinary.txt"):
            header = tarfile.TarInfo(name)
            header.size = 4
            archive.addfile(header, io.BytesIO(b"text"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(buffer.getvalue())
    before = sorted(tmp_path.rglob("*"))
    assert read(tmp_path / "in" / "a.tar") == ["text"] * 3
    assert sorted(tmp_path.rglob("*")) == before


def test_wrong_meta(tmp_path):
    """Only a name in the meta that says otherwise leaves a document out."""
    metas = [None, 3, [], {}, {"pile_set_name": None}, {"pile_set_name": 7}, {"pile_set_name": "Github"}]
    lines = [json.dumps({"text": str(number), "meta": meta}) for number, meta in enumerate(metas)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read(tmp_path / "a.jsonl", subset="Github") == ["0", "1", "2", "3", "4", "6"]


# Tables.


def write_table(path, rows=TEXTS, **columns):
    meta = [{"pile_set_name": "Github" if number % 2 else "ArXiv"} for number in range(len(rows))]
    table = pyarrow.table({"text": rows, "meta": meta, "embedding": [[0.5] * 3] * len(rows), **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.parquet._ROWS", 3)
    write_table(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == TEXTS
    assert read(tmp_path, subset="Github") == TEXTS[1::2]
    corpus = Corpus(find_files([tmp_path]), (), ("text",))
    seen = [(corpus.position, corpus.bytes_read, b"embedding" in chunk.content) for chunk in corpus.chunks()]
    assert [position.chunk for position, _, _ in seen] == list(range(1, len(seen) + 1))
    assert sorted(read for _, read, _ in seen) == [read for _, read, _ in seen]
    assert not any(others for _, _, others in seen)
    rest = Corpus(find_files([tmp_path])).chunks(Position(0, 2))
    assert list(read_texts(rest, DocumentOptions())) == TEXTS[6:] or len(seen) != 3


def test_rows_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.data.parquet._ROWS", 2)
    write_table(tmp_path / "a.parquet", ["a", "b", "c", None, "e"])
    with pytest.raises(UserError, match=r"a.parquet, row 4: 'text' is not a text but NoneType"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", skip_bad=True) == ["a", "b", "c", "e"]


def test_bad_tables(tmp_path):
    write_table(tmp_path / "a.parquet", raw=[b"\xff"] * len(TEXTS))
    with pytest.raises(UserError, match=r"has no column 'content'; its columns: text, meta, embedding, raw"):
        read(tmp_path / "a.parquet", columns=("content",), keys=("content",))
    with pytest.raises(UserError, match=r"column 'raw' is binary, not text"):
        read(tmp_path / "a.parquet", columns=("raw",), keys=("raw",))
    content = (tmp_path / "a.parquet").read_bytes()
    for damaged in (content[:-20], content[: len(content) // 2], b"", b"PAR1"):
        (tmp_path / "b.parquet").write_bytes(damaged)
        with pytest.raises(UserError, match=r"b.parquet is damaged, or no Parquet file"):
            read(tmp_path / "b.parquet")
    (tmp_path / "d.parquet.zst").touch()
    with pytest.raises(UserError, match=r"of no kind read here"):
        find_files([tmp_path / "d.parquet.zst"])


@pytest.mark.parametrize("module", ["pyarrow", "datasets"])
def test_absent_packages_are_named(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").touch()
    expected = rf"needs the package {module}, which is not installed: pip install -r requirements/data.txt"
    with pytest.raises(UserError, match=expected):
        read(tmp_path / "a.parquet") if module == "pyarrow" else HubCorpus("owner/name")


def test_one_kind_of_source(tmp_path):
    with pytest.raises(UserError, match="--hf is a source of its own"):
        prepare(PrepareOptions("pile", tmp_path, "CharLevelTokenizer", hub_name="a/b", sources=("c",)))
