"""The cache of sample indices."""

import errno
import os
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from megatron.data import index_cache
from megatron.data.datasets import SampleSettings
from megatron.data.index_cache import INDICES, build_once
from megatron.data.indexed_dataset import file_sha256
from tests.support.datasets import datasets_from_split
from tests.support.errors import assert_rejected

LENGTHS = (32, 32, 32)
ONE_EPOCH = (None, None, None)


def _folders(path) -> list[str]:
    return sorted(os.listdir(path))


def test_indices_are_built_once_next_to_the_data(corpus, settings):
    first = datasets_from_split(corpus, "8,1,1", LENGTHS, (10, 10, 10), settings)
    folders = _folders(f"{corpus}_indices")
    assert len(folders) == 3
    times = {path: os.stat(f"{corpus}_indices/{path}").st_mtime_ns for path in folders}
    second = datasets_from_split(corpus, "8,1,1", LENGTHS, (99, 99, 99), settings)
    assert {
        path: os.stat(f"{corpus}_indices/{path}").st_mtime_ns
        for path in _folders(f"{corpus}_indices")
    } == times
    for index in range(10):
        assert first.train[index]["tokens"].tolist() == second.train[index]["tokens"].tolist()


def test_changed_data_gets_new_indices(corpus, write_corpus, settings):
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    write_corpus(corpus, [100] * 30, seed=5)
    train = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
    assert train.samples_per_epoch == (30 * 100 - 1) // 32
    assert len(_folders(f"{corpus}_indices")) == 2


def test_interrupted_build_leaves_no_folder(corpus, settings, monkeypatch):
    monkeypatch.setattr(
        np, "save", lambda *arguments, **more: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    assert not Path(f"{corpus}_indices").exists()
    monkeypatch.undo()
    assert len(datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train) > 0


def test_cache_folder_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").touch()
    settings = SampleSettings(1000, 0, 1234, cache_path=str(tmp_path / "file"))
    assert_rejected(
        "data-cache-path", datasets_from_split, corpus, "1", LENGTHS, ONE_EPOCH, settings
    )


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def zeros(path):
    path.write_bytes(bytes(path.stat().st_size))


def zero_values(path):
    np.save(path, np.zeros_like(np.load(path)))


def truncated(path):
    os.truncate(path, path.stat().st_size - 3)


def longer(path):
    path.write_bytes(path.read_bytes() + bytes(5))


def one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 8
    path.write_bytes(content)


def other_dtype(path):
    np.save(path, np.load(path).astype(np.float32))


def swapped(path):
    other = path.with_name("document_index.npy")
    contents = path.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    path.write_bytes(contents[1])


def of_another_seed(path):
    """The files belong together, but not to this folder."""
    settings = SampleSettings(1000, 0, 99)
    datasets_from_split(
        str(path.parents[1]).removesuffix("_indices"), "1", LENGTHS, ONE_EPOCH, settings
    )
    (other,) = set(path.parents[1].iterdir()) - {path.parent}
    shutil.rmtree(path.parent)
    other.rename(path.parent)


DAMAGE = (
    *(zeros, zero_values, truncated, longer, one_bit, other_dtype, swapped, of_another_seed),
    lambda path: path.write_bytes(pickle.dumps(Payload())),
    lambda path: path.write_bytes(b""),
    lambda path: path.unlink(),
    lambda path: path.with_name("sha256").unlink(),  # as in caches of earlier versions
    lambda path: path.with_name("sha256").write_text("0" * 64),
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["sample_index.npy", "shuffle_index.npy"])
def test_damaged_indices_are_built_again(
    name, damage, corpus, settings, tmp_path, monkeypatch, capsys
):
    """Indices next to the data may come from someone else: nothing is unpickled."""
    monkeypatch.chdir(tmp_path)

    def rows():
        train = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
        return [train[index]["tokens"].tolist() for index in range(len(train))]

    expected = rows()
    (folder,) = Path(f"{corpus}_indices").iterdir()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert capsys.readouterr().err == ""
    damage(folder / name)
    assert rows() == expected
    assert capsys.readouterr().err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert rows() == expected
    assert capsys.readouterr().err == ""
    assert not Path("executed").exists()


def test_a_link_in_the_cache_is_not_followed(corpus, settings, tmp_path):
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    (folder,) = Path(f"{corpus}_indices").iterdir()
    (tmp_path / "mine").write_text("mine")
    (folder / "shuffle_index.npy").unlink()
    (folder / "shuffle_index.npy").symlink_to(tmp_path / "mine")
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    assert not (folder / "shuffle_index.npy").is_symlink()
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("syncs", range(1, 6))
def test_a_killed_build_is_completed(syncs, corpus, settings):
    """SIGKILL after some files: nothing has the final name, and the next run removes
    what is left.
    """
    pid = os.fork()
    if pid == 0:
        calls = []
        os.fsync = lambda descriptor: (
            os.kill(os.getpid(), 9) if len(calls) == syncs else calls.append(descriptor)
        )
        datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    assert all(name.endswith((".partial", ".lock")) for name in _folders(f"{corpus}_indices"))
    assert len(datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train) > 0
    (folder,) = _folders(f"{corpus}_indices")
    assert _folders(f"{corpus}_indices/{folder}") == sorted([*INDICES, "sha256"])


def test_a_start_while_another_run_writes(tmp_path, monkeypatch, capsys):
    """The second waits, uses the files of the first, and says nothing."""
    folder, save, saved, errors = tmp_path / "cache" / "indices", np.save, [], []

    def start():
        try:
            build_once(folder, lambda: [np.arange(3)] * 3)
        except BaseException as error:
            errors.append(error)

    second = threading.Thread(target=start)

    def save_slowly(*arguments, **options):
        save(*arguments, **options)
        saved.append(1)
        if len(saved) == 2:
            second.start()
            second.join(0.3)

    monkeypatch.setattr(np, "save", save_slowly)
    start()
    second.join(10)
    assert errors == []
    assert len(saved) == 3
    assert capsys.readouterr().err == ""
    assert _folders(tmp_path / "cache") == ["indices"]


def test_a_failing_run_does_not_touch_indices_in_use(tmp_path, monkeypatch, capsys):
    """Intact indices without a checksum, which another process may be reading."""
    folder, save = tmp_path / "indices", np.save
    build_once(folder, lambda: [np.arange(3)] * 3)
    (folder / "sha256").unlink()
    mapped = np.load(folder / INDICES[0], mmap_mode="r")

    def full(file, arr, **options):
        if file.name.endswith(INDICES[2]):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, arr, **options)

    monkeypatch.setattr(np, "save", full)
    assert_rejected("data-cache-path.*No space", build_once, folder, lambda: [np.arange(4)] * 3)
    assert _folders(tmp_path) == ["indices"]
    assert all(np.load(folder / name).tolist() == [0, 1, 2] for name in INDICES)
    monkeypatch.undo()
    build_once(folder, lambda: [np.arange(4)] * 3)
    assert "damaged" not in capsys.readouterr().err
    assert mapped.tolist() == [0, 1, 2]
    assert np.load(folder / INDICES[0]).tolist() == [0, 1, 2, 3]


def test_a_folder_without_checksum_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "indices"
    build_once(folder, lambda: [np.arange(3)] * 3)
    (folder / "sha256").unlink()

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    assert_rejected(
        "checksum.*data-cache-path.*Read-only", build_once, folder, lambda: [np.arange(3)] * 3
    )
    assert capsys.readouterr().err == ""


def test_intact_indices_are_hashed_once(tmp_path, monkeypatch):
    folder, hashed = tmp_path / "indices", []
    build_once(folder, lambda: [np.arange(3)] * 3)
    monkeypatch.setattr(
        index_cache, "file_sha256", lambda path: hashed.append(path.name) or file_sha256(path)
    )
    build_once(folder, lambda: pytest.fail("built again"))
    assert sorted(hashed) == sorted(INDICES)


def test_every_machine_builds_a_folder_on_its_local_disk(tmp_path, as_rank, monkeypatch):
    """The folder of rank 0 is not visible to rank 1, and built by the first rank of its machine
    only.
    """
    folder, built = tmp_path / "indices", []

    def build():
        built.append(1)
        return [np.arange(3)] * 3

    as_rank(0)
    build_once(folder, build)
    shutil.rmtree(folder)
    as_rank(1)
    build_once(folder, build)
    assert folder.is_dir()
    assert len(built) == 2
    shutil.rmtree(folder)
    monkeypatch.setenv("LOCAL_RANK", "1")
    as_rank(0)
    build_once(folder, build)
    shutil.rmtree(folder)
    as_rank(1)
    build_once(folder, build)
    assert not folder.exists()


def test_files_that_change_after_their_checksum(tmp_path, monkeypatch):
    write = index_cache.write_atomically

    def damage(path, content):
        write(path, content)
        (path.parent / INDICES[1]).write_bytes(b"other")

    monkeypatch.setattr(index_cache, "write_atomically", damage)
    folder = tmp_path / "indices" / "samples-1"
    assert_rejected("samples-1", build_once, folder, lambda: [np.arange(3)] * 3)
    assert not folder.exists()
