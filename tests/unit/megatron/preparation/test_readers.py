"""Reading input files of all formats into chunks, and damaged files."""

import gzip
import json
import lzma
import sys
import tarfile
import tracemalloc
import zipfile

import lm_dataformat
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.preparation import encoding, readers
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, read_texts
from megatron.preparation.encoding import work_items
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import START, FileCorpus, ReadPosition
from tests.support.archives import tar_of, zip_of
from tests.support.corpora import TEXTS, json_lines, read_inputs
from tests.support.errors import assert_rejected
from tests.support.texts import KINDS

LINES = "".join(
    json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n"
    for number, text in enumerate(TEXTS)
)
COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "enwik8.txt", "enwik8"])
def test_lines_and_text(tmp_path, name, compression):
    content, texts = (LINES, TEXTS) if "json" in name else (KINDS["unicode"], [KINDS["unicode"]])
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(COMPRESSIONS[compression](content.encode()))
    assert read_inputs(path) == texts


def test_lm_dataformat_archives(tmp_path):
    archive = lm_dataformat.Archive(str(tmp_path / "lmd"))
    for text in TEXTS[:5]:
        archive.add_data(text, meta={"source": "first"})
    archive.commit("first")
    for text in TEXTS[5:]:
        archive.add_data(text)
    archive.commit("second")
    assert (tmp_path / "lmd" / "current_chunk_incomplete").exists()
    assert read_inputs(tmp_path / "lmd") == TEXTS
    archive = lm_dataformat.JSONArchive(str(tmp_path / "list"))
    for text in TEXTS:
        archive.add_data(text)
    archive.commit()
    assert read_inputs(tmp_path / "list") == TEXTS


@pytest.mark.ci
@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40), max_size=12),
    block=st.integers(1, 70),
    final_newline=st.booleans(),
    blank_lines=st.booleans(),
)
def test_lines_across_blocks(tmp_path_factory, texts, block, final_newline, blank_lines):
    lines = [
        json.dumps({"text": text}) + "\n" * (1 + (blank_lines and len(text) % 3 == 0))
        for text in texts
    ]
    content = "".join(lines) if final_newline else "".join(lines).rstrip("\n")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK", block)
        chunks = list(FileCorpus(find_files([path])).chunks())
        assert read_inputs(path) == texts
    assert b"".join(chunk.content for chunk in chunks) == content.encode()
    for chunk in chunks:
        assert content.encode().find(chunk.content) == 0 or chunk.first_line > 1
        before = b"".join(
            earlier.content for earlier in chunks if earlier.first_line < chunk.first_line
        )
        assert chunk.first_line == 1 + before.count(b"\n")


def test_bytes_read_reach_the_total(tmp_path):
    for name, compression in (("a.jsonl", ""), ("b.jsonl.zst", ".zst")):
        (tmp_path / name).write_bytes(COMPRESSIONS[compression](LINES.encode()))
    corpus = FileCorpus(find_files([tmp_path]))
    bytes_read = [corpus.bytes_read for _ in corpus.chunks()]
    assert bytes_read == sorted(bytes_read)
    assert (
        corpus.bytes_read
        == corpus.total_bytes
        == sum(path.stat().st_size for path in tmp_path.iterdir())
    )


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    block=st.integers(20, 400),
    item_size=st.integers(1, 900),
    compressed=st.booleans(),
)
def test_resume_at_every_position(tmp_path_factory, data, block, item_size, compressed):
    """Reading from any recorded position gives exactly the remaining work items."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        texts = data.draw(st.lists(st.text(max_size=60), max_size=12))
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path = folder / f"{number}.jsonl{'.zst' if compressed else ''}"
        path.write_bytes(zstandard.compress(content) if compressed else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK", block)
        patch.setattr(encoding, "WORK_ITEM_BYTES", item_size)
        files = find_files([folder])
        expected = list(work_items(FileCorpus(files), START))
        cut = data.draw(st.integers(0, len(expected)))
        start = expected[cut - 1].position if cut else START
        rest = list(work_items(FileCorpus(files), start))
    assert rest == expected[cut:]
    assert start <= ReadPosition(len(files))


def test_file_that_shrank_since_the_position_was_recorded(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines("one"))
    assert_rejected(
        r"a\.jsonl", list, FileCorpus(find_files([tmp_path])).chunks(ReadPosition(0, 2))
    )


# --- archives


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz"])
def test_tar_of_shards(tmp_path, ending):
    members = {
        "2005/01.jsonl.zst": zstandard.compress(json_lines("one", "two")),
        "2005/02.jsonl": json_lines("three"),
        "notes.txt": KINDS["latex"].encode(),
    }
    compress = COMPRESSIONS[
        "." + ending.split(".")[-1] if ending not in (".tar", ".tgz") else ".gz"
    ]
    content = tar_of(members)
    (tmp_path / f"a{ending}").write_bytes(content if ending == ".tar" else compress(content))
    assert read_inputs(tmp_path / f"a{ending}") == ["one", "two", "three", KINDS["latex"]]


def test_archives_of_source_files(tmp_path):
    members = {
        "linux/a.c": b"a.c",
        "linux/deep/b.h": b"b.h",
        "linux/README": b"no",
        "linux/x.json": b"no",
    }
    members |= {"linux/deep/._b.h": b"\0\5\x16\7", "linux/.cache/c.h": b"no"}
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(tar_of(members)))
    assert read_inputs(tmp_path / "a.tar.xz", suffixes=(".c", ".h")) == ["a.c", "b.h"]
    (tmp_path / "a.zip").write_bytes(zip_of(members))
    assert read_inputs(tmp_path / "a.zip", suffixes=(".h",)) == ["b.h"]


def test_zip(tmp_path):
    members = {
        "folder/": b"",
        "folder/enwik8": KINDS["unicode"].encode(),
        "b.jsonl": LINES.encode(),
    }
    (tmp_path / "a.zip").write_bytes(zip_of(members, zipfile.ZIP_STORED))
    assert read_inputs(tmp_path / "a.zip") == [KINDS["unicode"], *TEXTS]
    # A compression that Python does not know: Zstandard is number 93.
    content = zip_of({"a.txt": b"text"}, zipfile.ZIP_STORED)
    for header, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        at = content.index(header) + place
        content = content[:at] + bytes([93, 0]) + content[at + 2 :]
    (tmp_path / "b.zip").write_bytes(content)
    assert_rejected(r"^(?!.*damaged).*b\.zip", read_inputs, tmp_path / "b.zip")


@pytest.mark.parametrize(
    ("inner", "suffixes"),
    [("b.tar.xz", ()), ("B.TGZ", (".txt",)), ("b.zip", ()), ("b.parquet", ())],
)
def test_archive_in_an_archive(tmp_path, inner, suffixes):
    """The error names the member, and the documents before it are read."""
    members = {"a.txt": b"text", f"x/{inner}": b"not read"}
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    (tmp_path / "a.zip").write_bytes(zip_of(members))
    for name in ("a.tar", "a.zip"):
        chunks = FileCorpus(find_files([tmp_path / name], suffixes), suffixes).chunks()
        assert next(chunks).content == b"text"
        assert_rejected(rf"{name}:x/{inner} .*extract", next, chunks)


def test_hidden_members(tmp_path):
    """macOS's tar adds `._NAME` to NAME; lm-dataformat keeps its unfinished archive next to the
    others.
    """
    members = {
        "x/._a.jsonl": b"\0\5\x16\7",
        "x/current_chunk_incomplete": b"\x28\xb5",
        ".git/HEAD": b"no",
    }
    members["./x/a.jsonl"] = json_lines("one")
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    (tmp_path / "b.zip").write_bytes(zip_of(members))
    assert read_inputs(tmp_path / "a.tar") == read_inputs(tmp_path / "b.zip") == ["one"]
    (tmp_path / "a.tar").write_bytes(tar_of({**members, "b.png": b"\x89PNG"}))  # not hidden
    assert_rejected(r"a\.tar:b\.png", read_inputs, tmp_path / "a.tar")


def test_tar_members_that_point_outside(tmp_path):
    """Nothing is written, and links are not followed."""
    (tmp_path / "secret.txt").write_text("secret")
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.txt")
    content = link.tobuf() + tar_of({"../up.txt": b"one", str(tmp_path / "absolute.txt"): b"two"})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(content)
    assert read_inputs(tmp_path / "in" / "a.tar") == ["one", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret.txt"]


# --- Parquet


def write_table(path, rows=TEXTS, **columns):
    meta = [{"pile_set_name": "Github" if number % 2 else "ArXiv"} for number in range(len(rows))]
    table = pyarrow.table(
        {"text": rows, "meta": meta, "embedding": [[0.5] * 3] * len(rows), **columns}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=4)


def test_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.preparation.readers.PARQUET_ROWS", 3)
    write_table(tmp_path / "a.parquet")
    assert read_inputs(tmp_path / "a.parquet") == TEXTS
    assert read_inputs(tmp_path, subset="Github") == TEXTS[1::2]
    corpus = FileCorpus(find_files([tmp_path]), (), ("text",))
    states = [
        (corpus.position, corpus.bytes_read, b"embedding" in chunk.content)
        for chunk in corpus.chunks()
    ]
    assert [position.chunk for position, _, _ in states] == list(range(1, len(states) + 1))
    assert sorted(read for _, read, _ in states) == [read for _, read, _ in states]
    assert not any(has_other_columns for _, _, has_other_columns in states)
    rest = FileCorpus(find_files([tmp_path])).chunks(ReadPosition(0, 2))
    assert list(read_texts(rest, DocumentOptions(), SkippedDocuments())) == TEXTS[6:]


def test_parquet_error_names_the_row(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.preparation.readers.PARQUET_ROWS", 2)
    write_table(tmp_path / "a.parquet", ["a", "b", "c", None, "e"])
    assert_rejected(r"a\.parquet.*4.*'text'.*NoneType", read_inputs, tmp_path / "a.parquet")
    assert read_inputs(tmp_path / "a.parquet", skip_bad=True) == ["a", "b", "c", "e"]


def test_invalid_parquet_files(tmp_path, monkeypatch):
    write_table(tmp_path / "a.parquet", raw=[b"\xff"] * len(TEXTS))
    assert_rejected(
        "no column 'content'", read_inputs, tmp_path / "a.parquet", columns=("content", "meta")
    )
    assert_rejected("'raw'", read_inputs, tmp_path / "a.parquet", columns=("raw",), keys=("raw",))
    content = (tmp_path / "a.parquet").read_bytes()
    for damaged in (content[:-20], content[: len(content) // 2], b"", b"PAR1"):
        (tmp_path / "b.parquet").write_bytes(damaged)
        assert_rejected(r"b\.parquet", read_inputs, tmp_path / "b.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_rejected("pyarrow.*'kerple-neox", read_inputs, tmp_path / "a.parquet")


# --- damaged files


TAR = tar_of(
    {f"{name}.jsonl": json_lines(name) for name in ("one", "two", "three")}
)  # two blocks per member


PLAIN = b"plain text, not an archive " * 40
DAMAGED_TARS = {
    "in a member": tar_of({"a.jsonl": json_lines(*map(str, range(2000)))})[:3000],
    # Python's tarfile treats the next three as complete.
    "between members": TAR[:1024],
    "in a header": TAR[:1100],
    "between header and content": TAR[:2560],
    "header": TAR[:1027] + bytes([TAR[1027] ^ 1]) + TAR[1028:],
    "zeros in place of members": TAR[:2048] + bytes(20 << 10),
    "concatenated": TAR + tar_of({"more.jsonl": json_lines("more")}),
}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(pytest.param("a.tar", content, id=kind) for kind, content in DAMAGED_TARS.items()),
        *((name, PLAIN) for name in ("a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.tar", "a.zip")),
    ],
)
def test_damaged_archives(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    message = name
    if content is DAMAGED_TARS["header"]:
        message += ".*1,024"
    assert_rejected(message, read_inputs, tmp_path / name)


def test_a_zip_file_with_a_damaged_directory(tmp_path):
    """A wrong length of a comment makes zipfile skip the files behind it."""
    content = bytearray(zip_of({f"{name}.txt": b"text" * 100 for name in range(9)}))
    second_entry = content.index(b"PK\1\2", content.index(b"PK\1\2") + 1)
    content[second_entry + 33] ^= 0x80
    (tmp_path / "a.zip").write_bytes(content)
    assert_rejected(r"a\.zip is damaged.*9", read_inputs, tmp_path / "a.zip")


def test_two_zip_files_in_one(tmp_path):
    """zipfile reads the last one."""
    content = zip_of({"a.txt": b"first"}) + zip_of({"b.txt": b"second"})
    (tmp_path / "a.zip").write_bytes(content)
    assert_rejected(r"a\.zip is damaged.*in front", read_inputs, tmp_path / "a.zip")


@pytest.mark.parametrize("name", ["a.txt.zst", "a.txt.xz", "a.jsonl.gz", "a.zip", "a.tar.gz"])
def test_bombs(tmp_path, monkeypatch, name):
    """A document of a compressed file or archive is limited, and is never in memory as a whole."""
    monkeypatch.setattr(readers, "MAX_COMPRESSED_DOCUMENT", 1 << 20)
    content = bytes(40 << 20)
    if name.endswith(".zip"):
        (tmp_path / name).write_bytes(zip_of({"b.txt": content}))
    elif ".tar" in name:
        (tmp_path / name).write_bytes(gzip.compress(tar_of({"b.txt": content})))
    else:
        (tmp_path / name).write_bytes(COMPRESSIONS[name[name.rindex(".") :]](content))
    del content
    tracemalloc.start()
    assert_rejected("1.*MiB", read_inputs, tmp_path / name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < {"zst": 40, ".xz": 20}.get(name[-3:], 12) << 20


def test_uncompressed_documents_are_not_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_COMPRESSED_DOCUMENT", 10)
    (tmp_path / "a.txt").write_text("longer than ten bytes")
    assert read_inputs(tmp_path / "a.txt") == ["longer than ten bytes"]
