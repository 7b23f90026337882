import os

import pytest

from megatron.utils.errors import UserError
from megatron.utils.files import sync_folder, write_atomically


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
    with pytest.raises(UserError, match=r"cannot write .*file: No space left on device"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_missing_folder(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*file: No such file or directory"):
        write_atomically(tmp_path / "missing" / "file", b"")
    sync_folder(tmp_path / "missing")  # is ignored
