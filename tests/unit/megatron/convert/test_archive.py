"""Archives are unpacked only inside their folder, without links and up to a size."""

import bz2
import gzip
import lzma
import stat
import tarfile
import zipfile

import pytest

from megatron.convert import archive as archive_module
from megatron.convert.archive import unpack
from megatron.convert.output import new_folder
from megatron.utils.errors import UserError
from tests.support.archives import tar_of, zip_of
from tests.support.hostile import write_long_header

FILES = {"run/latest": b"global_step5", "run/global_step5/a.pt": bytes(range(256)) * 50}


def write_tar(path, files=FILES, mode="w", extra=()):
    path.write_bytes(tar_of(files, mode, extra))
    return path


def write_zip(path, files=FILES, compression=zipfile.ZIP_DEFLATED):
    path.write_bytes(zip_of(files, compression))
    return path


def check_rejected(path, tmp_path, message, **options):
    """Unpacking fails and leaves nothing, neither in the folder nor next to it."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=message), new_folder(tmp_path / "out") as folder:
        unpack(path, folder, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_contents_are_unpacked(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    if kind == "zip":
        write_zip(path)
    else:
        write_tar(path, mode="w:" + kind.partition(".")[2])
    folder = tmp_path / "out"
    folder.mkdir()
    assert unpack(path, folder) == 2
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/../../escaped", "a\\..\\escaped", "C:/escaped"])
@pytest.mark.parametrize("write", [write_zip, write_tar], ids=["zip", "tar"])
def test_names_outside_the_folder(write, name, tmp_path):
    path = write(tmp_path / "bad.archive", {"good": b"1", name: b"2"})
    check_rejected(path, tmp_path, "is outside the folder")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_tar(kind, tmp_path):
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "../../etc/passwd"
    check_rejected(write_tar(tmp_path / "bad.tar", extra=[info]), tmp_path, "'link' is a link or a device")


def test_hidden_files_are_left_out(tmp_path):
    """macOS adds ._NAME for every file."""
    files = {**FILES, "run/._latest": b"x", "run/global_step5/._a.pt": b"x"}
    (tmp_path / "out").mkdir()
    assert unpack(write_tar(tmp_path / "a.tar", files), tmp_path / "out") == len(FILES)
    assert not list((tmp_path / "out").rglob("._*"))


def test_links_in_zip(tmp_path):
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as opened:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        opened.writestr(info, "../outside")
    check_rejected(path, tmp_path, "'link' is a link or a device")


@pytest.mark.parametrize("write", [write_zip, lambda path: write_tar(path, mode="w:gz")], ids=["zip", "tar.gz"])
def test_bombs(write, tmp_path, monkeypatch):
    monkeypatch.setitem(FILES, "bomb", bytes(5_000_000))
    path = write(tmp_path / "bomb.archive")
    assert path.stat().st_size < 50_000
    check_rejected(path, tmp_path, "unpacks to more than 1000000 bytes", max_bytes=1_000_000)


def test_too_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "MAX_FILES", 20)
    path = write_zip(tmp_path / "many.zip", {str(number): b"" for number in range(21)})
    check_rejected(path, tmp_path, "more than 20 members")


def test_colliding_names(tmp_path):
    info = tarfile.TarInfo("run/latest")
    check_rejected(write_tar(tmp_path / "twice.tar", extra=[info]), tmp_path, "contains 'run/latest' twice")
    path = write_tar(tmp_path / "both.tar", {"a": b"1", "a/b": b"2"})
    check_rejected(path, tmp_path, "is both a file and a folder")


def test_damaged_and_missing_archives(tmp_path):
    complete = write_tar(tmp_path / "whole.tar.gz", mode="w:gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(complete[: len(complete) // 2])
    check_rejected(tmp_path / "cut.tar.gz", tmp_path, "is not a complete archive")
    (tmp_path / "text.zip").write_text("no archive")
    check_rejected(tmp_path / "text.zip", tmp_path, "is not a complete archive")
    check_rejected(tmp_path / "missing.zip", tmp_path, "No such file")
    check_rejected(write_zip(tmp_path / "empty.zip", {}), tmp_path, "contains no files")


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"S"])
@pytest.mark.parametrize("opened", [open, gzip.open, bz2.open, lzma.open])
def test_headers_of_any_size_are_not_read(kind, opened, tmp_path):
    """PAX headers, GNU's long names, and a chain of sparse headers."""
    with opened(tmp_path / "bad.tar", "wb") as target:
        write_long_header(target, kind, 3 << 20)
    check_rejected(tmp_path / "bad.tar", tmp_path, "a header has more than 1,048,576 bytes")


def test_the_headers_of_all_members_are_not_kept(tmp_path):
    """tarfile copies global headers to every member."""
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for number in range(200):
            tar.fileobj.write(tarfile.TarInfo.create_pax_global_header({f"key{number}": "value"}))
            tar.addfile(tarfile.TarInfo(f"file{number}"))
    check_rejected(tmp_path / "bad.tar", tmp_path, "more than 100 global headers")


def test_xz_files_do_not_choose_the_memory(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    (tmp_path / "bad.tar.xz").write_bytes(lzma.compress(bytes(10_000), filters=filters))
    check_rejected(tmp_path / "bad.tar.xz", tmp_path, "Memory usage limit exceeded")


def test_concatenated_bz2_streams(tmp_path):
    plain = write_tar(tmp_path / "plain.tar").read_bytes()
    (tmp_path / "a.tar.bz2").write_bytes(bz2.compress(plain[:700]) + bz2.compress(plain[700:]))
    folder = tmp_path / "out"
    folder.mkdir()
    assert unpack(tmp_path / "a.tar.bz2", folder) == 2


def test_zip_members_are_stored_or_deflated(tmp_path):
    """Python's zipfile reads others without a limit."""
    check_rejected(
        write_zip(tmp_path / "bad.zip", compression=zipfile.ZIP_LZMA), tmp_path, "is not compressed with deflate"
    )
