import errno
import os
import re

from megatron.utils.files import (
    check_writable,
    expanded_path,
    read_file,
    read_lines,
    sync_folder,
    write_atomically,
)
from tests.support.errors import assert_rejected


def test_content_is_replaced(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_old_content_survives_an_error(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert_rejected(r"cannot write .*file: No space left on device", write_atomically, path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_missing_folder(tmp_path):
    path = tmp_path / "missing" / "file"
    assert_rejected(r"cannot write .*file: No such file or directory", write_atomically, path, b"")
    sync_folder(tmp_path / "missing")  # is ignored


def test_a_folder_is_writable(tmp_path):
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        check_writable(folder, "save")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for folder, reason in {
        "file": "Not a directory",
        "file/folder": "Not a directory",
        "link": "No such file or directory",
    }.items():
        assert_rejected(rf"^log-dir: .*: {reason}", check_writable, tmp_path / folder, "log-dir")


def test_a_full_disk_is_not_writable(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_rejected(r"save: .*: No space left on device", check_writable, tmp_path, "save")
    assert list(tmp_path.iterdir()) == []


def test_read_file_accepts_only_small_regular_files(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    assert_rejected("file is larger than 4 bytes", read_file, path, 4)
    os.mkfifo(tmp_path / "fifo")
    for name in (tmp_path / "fifo", "/dev/zero"):
        assert_rejected("is not a regular file", read_file, name, 4)
    assert_rejected(r"cannot read .*: Is a directory", read_file, tmp_path, 4)
    assert_rejected(r"cannot read .*missing: No such file", read_file, tmp_path / "missing", 4)


def test_lines_of_limited_length(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"ab\n\n" + b"c" * 9)
    assert list(read_lines(path, 9)) == [b"ab\n", b"\n", b"c" * 9]
    assert_rejected("line 3 is longer than 8 bytes", list, read_lines(path, 8))


def test_secrets_of_variables_are_no_part_of_a_path(monkeypatch):
    """Those that are written out are found where the path is used."""
    monkeypatch.setenv("LOGIN", "user:abcdefg@host")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    for text in ("https://$LOGIN/data", "a/${WANDB_API_KEY}"):
        assert_rejected(re.escape(text), expanded_path, text)
    for text in ("https://user:abcdefg@host/data", "a/0123456789"):
        assert expanded_path(text) == text
