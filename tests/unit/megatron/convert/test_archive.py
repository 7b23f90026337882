"""Archives are unpacked only inside their folder, without links and up to a size."""

import stat
import tarfile
import zipfile

import pytest

from megatron.convert.archive import unpack
from megatron.convert.output import new_folder
from megatron.utils.errors import UserError
from tests.support.archives import tar_of, zip_of

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


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a\\..\\escaped", "C:/escaped"])
@pytest.mark.parametrize("write", [write_zip, write_tar], ids=["zip", "tar"])
def test_names_outside_the_folder(write, name, tmp_path):
    path = write(tmp_path / "bad.archive", {"good": b"1", name: b"2"})
    check_rejected(path, tmp_path, "is outside the folder")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE])
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


def test_damaged_and_missing_archives(tmp_path):
    complete = write_tar(tmp_path / "whole.tar.gz", mode="w:gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(complete[: len(complete) // 2])
    check_rejected(tmp_path / "cut.tar.gz", tmp_path, "cut.tar.gz")
    (tmp_path / "text.zip").write_text("no archive")
    check_rejected(tmp_path / "text.zip", tmp_path, "text.zip")
    check_rejected(tmp_path / "missing.zip", tmp_path, "missing.zip")
    check_rejected(write_zip(tmp_path / "empty.zip", {}), tmp_path, "empty.zip")
