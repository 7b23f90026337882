import os
import socket

import pytest

from megatron.utils.errors import UserError
from megatron.utils.locks import Lock


def test_only_one_holder(tmp_path):
    path = tmp_path / "new folder" / "corpus.lock"
    with Lock(path, "busy"), pytest.raises(UserError, match="busy"):
        Lock(path, "busy").acquire()
    assert not path.exists()
    with Lock(path, "busy"):
        assert path.exists()


def test_the_message_names_the_holder(tmp_path):
    path = tmp_path / "corpus.lock"
    holder = rf"busy \(held by process {os.getpid()} on {socket.gethostname()}\)"
    with Lock(path, "busy"):
        with pytest.raises(UserError, match=holder):
            Lock(path, "busy").acquire()
        path.write_bytes(b"\x1b[31m\xff")  # by a program that is not ours
        with pytest.raises(UserError, match=r"busy$"):
            Lock(path, "busy").acquire()


def test_release_without_acquire(tmp_path):
    lock = Lock(tmp_path / "corpus.lock", "busy")
    lock.release()
    lock.acquire()
    lock.release()
    lock.release()


def test_lock_of_a_dead_process_is_free(tmp_path):
    path = tmp_path / "corpus.lock"
    child = os.fork()
    if child == 0:
        Lock(path, "busy").acquire()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    with Lock(path, "busy"):
        pass


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file: "):
        Lock(tmp_path / "file" / "corpus.lock", "busy").acquire()
