"""Archives are unpacked only inside their folder."""

import contextlib
import gzip
import os
import shutil
import stat
import tarfile
import zipfile
from functools import partial
from types import SimpleNamespace

import pytest

from megatron.checkpoint.storage import CheckpointError
from megatron.convert.archive import unpack
from megatron.convert.output import new_folder
from tests.support.archives import tar_of, zip_of
from tests.support.errors import assert_rejected

FILES = {"run/latest": b"global_step5", "run/global_step5/a.pt": bytes(range(256)) * 50}


def write_tar(path, files=FILES, mode="w", extra=()):
    path.write_bytes(tar_of(files, mode, extra))
    return path


def write_zip(path, files=FILES, compression=zipfile.ZIP_DEFLATED):
    path.write_bytes(zip_of(files, compression))
    return path


def check_rejected(path, tmp_path, message):
    """Unpacking fails and leaves nothing, neither in the folder nor next to it."""
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=message), new_folder(tmp_path / "out") as folder:
        unpack(path, folder)
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
    unpack(path, folder)
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


@pytest.mark.parametrize("write", [write_zip, write_tar], ids=["zip", "tar"])
def test_names_with_two_dots_are_unpacked(write, tmp_path):
    path = write(tmp_path / "a.archive", {"run/step 1..5/notes..txt": b"1"})
    (tmp_path / "out").mkdir()
    unpack(path, tmp_path / "out")
    assert (tmp_path / "out/run/step 1..5/notes..txt").read_bytes() == b"1"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
@pytest.mark.parametrize("padding", [0, 20])
def test_a_tar_file_that_ends_with_a_zip_file(mode, padding, tmp_path):
    """Files of torch are zip files. Compression stores what it cannot shrink."""
    content = zip_of({"data.pkl": os.urandom(300) + bytes(padding)}, zipfile.ZIP_STORED)
    path = write_tar(
        tmp_path / "a.tar", {"PK/latest": b"global_step7", "PK/global_step7/b.pt": content}, mode
    )
    (tmp_path / "out").mkdir()
    unpack(path, tmp_path / "out")
    assert (tmp_path / "out/PK/global_step7/b.pt").read_bytes() == content


@pytest.mark.parametrize(
    "write", [write_zip, partial(write_tar, mode="w"), partial(write_tar, mode="w:xz")]
)
def test_an_archive_that_does_not_fit_on_the_disk(write, tmp_path, monkeypatch):
    """The archive is much smaller than its files."""
    path = write(tmp_path / "bomb.archive", {"a": bytes(30_000), "b/c": bytes(40_000)})
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=69_999))
    check_rejected(path, tmp_path, r"bomb\.archive: .*70,000 .*69,999")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=70_000))
    with new_folder(tmp_path / "out") as folder:
        unpack(path, folder)
    assert (tmp_path / "out" / "b/c").stat().st_size == 40_000


@pytest.mark.parametrize("write", [write_zip, write_tar], ids=["zip", "tar"])
def test_no_file_is_outside_the_folder(write, tmp_path):
    names = ["../escaped", f"{tmp_path}/escaped", "run/../../escaped"]
    (tmp_path / "out").mkdir()
    for name in names:
        path = write(tmp_path / "bad.archive", {"good": b"1", name: b"2"})
        with contextlib.suppress(CheckpointError):
            unpack(path, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.archive", "out"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_links_out_of_the_folder_and_devices(kind, tmp_path):
    info = tarfile.TarInfo("link")
    info.type, info.linkname = kind, "../../etc/passwd"
    check_rejected(write_tar(tmp_path / "bad.tar", extra=[info]), tmp_path, "bad.tar: .*'link'")


def test_links_in_zip_are_not_created(tmp_path):
    path, folder = tmp_path / "bad.zip", tmp_path / "out"
    with zipfile.ZipFile(path, "w") as opened:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        opened.writestr(info, "../outside")
    folder.mkdir()
    unpack(path, folder)
    assert not (folder / "link").is_symlink()


def test_damaged_and_missing_archives(tmp_path):
    complete = write_tar(tmp_path / "whole.tar.gz", mode="w:gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(complete[: len(complete) // 2])
    check_rejected(tmp_path / "cut.tar.gz", tmp_path, "cut.tar.gz")
    (tmp_path / "text.zip").write_text("no archive")
    check_rejected(tmp_path / "text.zip", tmp_path, "text.zip")
    os.mkfifo(tmp_path / "pipe.tar")
    assert_rejected("missing.zip", unpack, tmp_path / "missing.zip", tmp_path / "out")
    assert_rejected("pipe.tar", unpack, tmp_path / "pipe.tar", tmp_path / "out")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_any_damage_of_a_tar_file_is_noticed(mode, tmp_path):
    """Cut after a member, a changed header, and zeros in place of the last members."""
    names = ("run/latest", "run/global_step5/a.pt", "run/global_step5/b.pt")
    content = tar_of(dict.fromkeys(names, bytes(range(256)) * 40))
    second = 512 + 10_240
    header = bytearray(content)
    header[second + 3] ^= 1
    zeros = content[:second] + bytes(len(content) - second)
    for number, damaged in enumerate((content[:second], header, zeros)):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(gzip.compress(damaged) if mode == "w:gz" else damaged)
        check_rejected(path, tmp_path, path.name)


def test_the_checksum_of_a_compressed_tar_file(tmp_path):
    content = bytearray(write_tar(tmp_path / "a.tar.gz", mode="w:gz").read_bytes())
    content[-7] ^= 4
    (tmp_path / "a.tar.gz").write_bytes(content)
    check_rejected(tmp_path / "a.tar.gz", tmp_path, "CRC")
