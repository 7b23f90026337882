"""Reading input files of all kinds, lm-dataformat's archives among them, and damaged ones."""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import lm_dataformat
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import readers
from megatron.data.documents import DocumentOptions, read_texts
from megatron.data.input_files import find_files
from megatron.data.readers import Corpus
from megatron.utils.errors import UserError
from tests.support.texts import KINDS

TEXTS = [*KINDS.values(), "", "last"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=number % 2 == 0) + "\n" for number, text in enumerate(TEXTS))
COMPRESSIONS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress}


def read(*paths) -> list[str]:
    return list(read_texts(Corpus(find_files(paths)).chunks(), DocumentOptions()))


def lines_of(*texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def tar_of(members, mode="w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ending", [".jsonl", ".json", ".ndjson"])
def test_json_lines(tmp_path, ending, compression):
    path = tmp_path / f"a{ending}{compression}"
    path.write_bytes(COMPRESSIONS[compression](LINES.encode()))
    assert read(path) == TEXTS


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("ending", [".txt", ""])
def test_text(tmp_path, ending, compression):
    path = tmp_path / f"enwik8{ending}{compression}"
    path.write_bytes(COMPRESSIONS[compression](KINDS["unicode"].encode()))
    assert read(path) == [KINDS["unicode"]]


def test_empty_files(tmp_path):
    for name in ("a.jsonl", "b.jsonl.zst", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert read(tmp_path) == [""]


def test_lm_dataformat_archive(tmp_path):
    archive = lm_dataformat.Archive(str(tmp_path / "lmd"))
    for text in TEXTS[:5]:
        archive.add_data(text, meta={"source": "first"})
    archive.commit("first")
    for text in TEXTS[5:]:
        archive.add_data(text)
    archive.commit("second")
    assert (tmp_path / "lmd" / "current_chunk_incomplete").exists()
    assert read(tmp_path / "lmd") == TEXTS


def test_lm_dataformat_dat_archive(tmp_path):
    archive = lm_dataformat.DatArchive(str(tmp_path / "lmd"))
    for text in TEXTS:
        archive.add_data(text)
    archive.commit()
    assert read(tmp_path / "lmd") == TEXTS


def test_lm_dataformat_json_archive(tmp_path):
    archive = lm_dataformat.JSONArchive(str(tmp_path / "lmd"))
    for text in TEXTS:
        archive.add_data(text)
    archive.commit()
    assert read(tmp_path / "lmd") == TEXTS


@pytest.mark.parametrize("ending", [".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.xz"])
def test_tar_of_shards(tmp_path, ending):
    members = {
        "2005/01.jsonl.zst": zstandard.compress(lines_of("one", "two")),
        "2005/02.jsonl": lines_of("three"),
        "notes.txt": KINDS["latex"].encode(),
    }
    compress = COMPRESSIONS["." + ending.split(".")[-1] if ending not in (".tar", ".tgz") else ".gz"]
    content = tar_of(members)
    (tmp_path / f"a{ending}").write_bytes(content if ending == ".tar" else compress(content))
    assert read(tmp_path / f"a{ending}") == ["one", "two", "three", KINDS["latex"]]


def test_openwebtext2_layout(tmp_path):
    """openwebtext2.jsonl.zst.tar: a plain tar of compressed shards."""
    members = {"2005-06.jsonl.zst": zstandard.compress(lines_of("one")), "2005-07.jsonl.zst": zstandard.compress(b"")}
    (tmp_path / "openwebtext2.jsonl.zst.tar").write_bytes(tar_of(members))
    assert read(tmp_path / "openwebtext2.jsonl.zst.tar") == ["one"]


def test_a_tar_cannot_write_outside(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tar").write_bytes(tar_of({"../../escaped.txt": b"text", "/absolute.txt": b"more"}))
    assert read(tmp_path / "in" / "a.tar") == ["text", "more"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "in"]


def test_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("folder/", "")
        archive.writestr("folder/enwik8", KINDS["unicode"])
        archive.writestr("b.jsonl", LINES)
    assert read(tmp_path / "a.zip") == [KINDS["unicode"], *TEXTS]


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(max_size=40), max_size=12),
    block=st.integers(1, 70),
    final_newline=st.booleans(),
    blank_lines=st.booleans(),
)
def test_lines_across_blocks(tmp_path_factory, texts, block, final_newline, blank_lines):
    lines = [json.dumps({"text": text}) + "\n" * (1 + (blank_lines and len(text) % 3 == 0)) for text in texts]
    content = "".join(lines) if final_newline else "".join(lines).rstrip("\n")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK", block)
        chunks = list(Corpus(find_files([path])).chunks())
        assert read(path) == texts
    assert b"".join(chunk.content for chunk in chunks) == content.encode()
    for chunk in chunks:
        assert content.encode().find(chunk.content) == 0 or chunk.first_line > 1
        before = b"".join(other.content for other in chunks if other.first_line < chunk.first_line)
        assert chunk.first_line == 1 + before.count(b"\n")


def test_large_blocks_of_compressed_frames(tmp_path):
    """Several frames one after the other, as `cat a.zst b.zst` makes, larger than the buffers."""
    texts = [f"{number} " * 3000 for number in range(400)]
    frames = [zstandard.compress(lines_of(*texts[start : start + 100])) for start in range(0, 400, 100)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert read(tmp_path / "a.jsonl.zst") == texts


def test_bytes_read_reach_the_total(tmp_path):
    for name, compression in (("a.jsonl", ""), ("b.jsonl.zst", ".zst")):
        (tmp_path / name).write_bytes(COMPRESSIONS[compression](LINES.encode()))
    corpus = Corpus(find_files([tmp_path]))
    seen = [corpus.bytes_read for _ in corpus.chunks()]
    assert seen == sorted(seen)
    assert corpus.bytes_read == corpus.total_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_files_are_found_in_order(tmp_path):
    for name in ("b.jsonl", "a.txt", "deep/c.jsonl.zst", "README.md", ".hidden.txt", "LICENSE", "model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_files([tmp_path / "b.jsonl", tmp_path])
    assert [file.name.removeprefix(f"{tmp_path}/") for file in found] == [
        "b.jsonl",
        "a.txt",
        "b.jsonl",
        "deep/c.jsonl.zst",
    ]


def test_inputs_that_cannot_be_read(tmp_path):
    (tmp_path / "a.orc").touch()
    with pytest.raises(UserError, match=r"no input is named"):
        find_files([])
    with pytest.raises(UserError, match=r"absent.jsonl does not exist"):
        find_files([tmp_path / "absent.jsonl"])
    with pytest.raises(UserError, match=r"a.orc is of no kind read here: .jsonl, "):
        find_files([tmp_path / "a.orc"])
    with pytest.raises(UserError, match=r"holds no file of a kind read here"):
        find_files([tmp_path])


def test_parquet_and_zip_in_a_tar(tmp_path):
    table, packed = io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), table)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("b.jsonl", lines_of("zipped"))
    content = tar_of({"x/a.parquet": table.getvalue(), "b.zip": packed.getvalue(), "c.jsonl": lines_of("last")})
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(content))
    corpus = Corpus(find_files([tmp_path / "a.tar.gz"]))
    assert list(read_texts(corpus.chunks(), DocumentOptions())) == [*TEXTS, "zipped", "last"]
    assert corpus.bytes_read == corpus.total_bytes
    (tmp_path / "b.tar").write_bytes(tar_of({"a.parquet": table.getvalue()[:-9]}))
    with pytest.raises(UserError, match=r"b.tar:a.parquet is damaged, or no Parquet file"):
        read(tmp_path / "b.tar")


def test_hidden_members(tmp_path):
    """macOS's tar writes `._NAME` beside NAME; lm-dataformat's unfinished archive is in the folder of the others."""
    members = {"x/._a.jsonl": b"\0\5\x16\7", "x/current_chunk_incomplete": b"\x28\xb5", "x/a.jsonl": lines_of("one")}
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert read(tmp_path / "a.tar") == read(tmp_path / "b.zip") == ["one"]


def test_unknown_member(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of({"b.png": b"\x89PNG"}))
    with pytest.raises(UserError, match=r"a.tar:b.png is of no kind read here"):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize("compression", [".gz", ".zst", ".xz"])
@pytest.mark.parametrize("kept", [0.3, 0.9, 0.995])
def test_truncated_compressed_file(tmp_path, compression, kept):
    texts = [f"{number * 7919 % 104729:x}" * 50 for number in range(4000)]
    content = COMPRESSIONS[compression](lines_of(*texts))
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(UserError, match=rf"a.jsonl{compression} is (damaged or )?truncated"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.tar", "a.zip", "a.tar.gz"])
def test_not_what_the_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(b"plain text, no archive at all " * 40)
    with pytest.raises(UserError, match=rf"(cannot read .*{name}|{name} is damaged)"):
        read(tmp_path / name)


def test_truncated_tar(tmp_path):
    content = tar_of({"a.jsonl": lines_of(*map(str, range(2000)))})
    (tmp_path / "a.tar").write_bytes(content[:3000])
    with pytest.raises(UserError, match=r"a.tar is damaged or truncated"):
        read(tmp_path / "a.tar")


@pytest.mark.parametrize("size", [1024, 1100, 1535, 1536, 2560])
def test_tar_cut_between_members(tmp_path, size):
    """Python's tarfile takes such an archive for a whole one."""
    content = tar_of({"a.jsonl": lines_of("one"), "b.jsonl": lines_of("two"), "c.jsonl": lines_of("three")})
    assert content[1024 + 257 :].startswith(b"ustar")  # a member takes two blocks
    (tmp_path / "a.tar").write_bytes(content[:size])
    with pytest.raises(UserError, match=r"a.tar is damaged or truncated"):
        read(tmp_path / "a.tar")


def test_tar_with_a_damaged_header(tmp_path):
    content = bytearray(tar_of({"a.jsonl": lines_of("one"), "b.jsonl": lines_of("two")}))
    content[1024 + 3] ^= 1
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"a.tar is damaged or truncated: bad checksum at byte 1,024"):
        read(tmp_path / "a.tar")


def test_tars_one_behind_the_other(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_of({"a.jsonl": lines_of("one")}) + tar_of({"b.jsonl": lines_of("two")}))
    with pytest.raises(UserError, match=r"a.tar goes on behind the end of its archive"):
        read(tmp_path / "a.tar")


def test_checksum_behind_the_last_member(tmp_path):
    """gzip's stands at the end of the file, which nobody has to read to have all members."""
    content = bytearray(gzip.compress(tar_of({"a.jsonl": lines_of("one")})))
    content[-6] ^= 1
    (tmp_path / "a.tar.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a.tar.gz: CRC check failed"):
        read(tmp_path / "a.tar.gz")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%016d" % 3 + b"abc" + b"12x", "record 2: expected 16 digits"),
        (b"%016d" % 3 + b"abc" + b"%016d" % 9 + b"ab", "record 2: truncated, 2 of 9 bytes"),
    ],
)
def test_damaged_dat(tmp_path, content, message):
    (tmp_path / "a.dat.zst").write_bytes(zstandard.compress(content))
    with pytest.raises(UserError, match=rf"a.dat.zst, {message}"):
        read(tmp_path / "a.dat.zst")


def test_unreadable_file(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINES)

    def fail(*arguments, **more):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(readers, "_line_blocks", fail)
    with pytest.raises(UserError, match=r"cannot read .*a.jsonl: Input/output error"):
        read(Path(tmp_path / "a.jsonl"))
