"""Finding input files in folders."""

import gzip
import os
from pathlib import Path

import pytest

from megatron.preparation.input_files import file_format, find_files
from megatron.preparation.readers import FileCorpus
from tests.support.corpora import read_inputs
from tests.support.errors import assert_rejected


@pytest.mark.parametrize(
    ("name", "suffixes", "expected"),
    [
        ("a.jsonl.zst", (), "lines"),
        ("LICENSE", (), "text"),
        ("a.tgz", (), "tar"),
        ("a.parquet", (), "parquet"),
        ("a.parquet.zst", (), None),
        ("a.md", (), "text"),
        ("a.png", (), None),
        ("a.c", (".c",), "text"),
        ("a.C", (".c",), None),
        ("a.tar.xz", (".c",), "tar"),
    ],
)
def test_file_format(name, suffixes, expected):
    assert file_format(name, suffixes) == expected


def test_files_of_a_folder(tmp_path, capsys):
    """Files are sorted by path. Those that preprocessing and downloads write, and others, are
    counted in the log.
    """
    read = ["a.jsonl", "a.txt", "b.source.json", "deep/c.jsonl.zst"]
    written = ["x_text.bin", "x_text.idx", "x_text.json", "y.progress.json", "a.jsonl.source.json"]
    other = [
        "README.md",
        "README",
        "LICENSE",
        ".hidden.txt",
        ".git/x.json",
        "c.png",
        "d.png",
        "\x1b[2J.x\x1b",
    ]
    for name in (*read, *written, *other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path.parent / "first.txt").touch()
    files = find_files([tmp_path.parent / "first.txt", tmp_path])
    names = [str(tmp_path.parent / "first.txt"), *(f"{tmp_path}/{name}" for name in read)]
    assert [file.name for file in files] == names
    shown = capsys.readouterr().err
    assert f"{tmp_path}: skipped 13 files: hidden, named README or of other types (" in shown
    assert "2 .png" in shown
    assert "2 no extension" in shown
    assert "input: 5 files, 0 bytes" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("names", "suffixes", "message"),
    [
        ([], (), "no input files given"),
        (["https://user:secret@example.org/a.jsonl"], (), "URL.*--url"),
        (["absent.jsonl"], (), r"absent\.jsonl"),
        (["a.orc"], (), r"a\.orc"),
        (["."], (), "contains no file of a supported type"),
        *((["."], (suffix,), "is not a file extension") for suffix in ("c", "*.c", ".tar.gz")),
        (["."], (".rs", ".go"), r"contains no file whose name ends in .rs or .go"),
        (["../data.json"], (".c",), r"data\.json"),
    ],
)
def test_errors(tmp_path, monkeypatch, names, suffixes, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "a.orc").touch()
    (tmp_path / "data.json").touch()
    assert_rejected(message, find_files, names, suffixes)


# --- trees of source code


@pytest.fixture
def tree(tmp_path):
    tree = tmp_path / "tree"
    for name in (
        "a.c",
        "deep/b.h",
        "deep/er/c.c",
        "README",
        "x.py",
        "data.json",
        ".hidden/d.c",
        "e.c.gz",
        "._a.c",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(
            gzip.compress(name.encode()) if name.endswith(".gz") else name.encode()
        )
    (tree / "link.c").symlink_to("a.c")
    return tree


def test_a_file_that_is_given_twice(tmp_path, monkeypatch):
    """Its second copy could be in the validation data."""
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for inputs in (["a.txt", "./a.txt"], ["a.txt", tmp_path]):
        assert_rejected(r"a\.txt is given twice", find_files, inputs)


def test_source_tree(tree):
    names = read_inputs(tree, suffixes=(".c", ".h"))
    assert sorted(names) == ["a.c", "deep/b.h", "deep/er/c.c", "e.c.gz"]
    assert names != sorted(
        names
    )  # shuffled, so that the parts of a split contain all kinds of files
    assert names == read_inputs(tree, suffixes=(".h", ".c"))


def test_inputs_that_are_not_regular_files(tmp_path, capsys):
    """Nothing waits for a FIFO or reads a device without end."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", "/dev/stdin"):
        assert_rejected("is not a regular file", find_files, [path])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "broken.txt").symlink_to("absent")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert [Path(file.name).name for file in find_files([tmp_path])] == ["a.txt"]
    assert (
        "skipped 3 links to folders, broken links, pipes, sockets or devices"
        in capsys.readouterr().err
    )
    (file,) = find_files([tmp_path / "a.txt"])
    (tmp_path / "a.txt").unlink()
    os.mkfifo(tmp_path / "a.txt")
    assert_rejected("is not a regular file", list, FileCorpus([file]).chunks())


def test_folder_that_cannot_be_read(tmp_path, monkeypatch):
    """Its files would be missing without notice."""
    (tmp_path / "private").mkdir()
    (tmp_path / "a.txt").write_text("text")
    scandir = os.scandir

    def fail(path):
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    assert_rejected(r"cannot read input .*private: Permission denied", find_files, [tmp_path])
