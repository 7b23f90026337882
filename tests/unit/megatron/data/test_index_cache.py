"""The cache of sample indices."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.data.datasets import SampleSettings
from megatron.data.index_cache import build_once
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
    assert {path: os.stat(f"{corpus}_indices/{path}").st_mtime_ns for path in _folders(f"{corpus}_indices")} == times
    for index in range(10):
        assert first.train[index]["tokens"].tolist() == second.train[index]["tokens"].tolist()


def test_changed_data_gets_new_indices(corpus, write_corpus, settings):
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    write_corpus(corpus, [100] * 30, seed=5)
    train = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
    assert train.samples_per_epoch == (30 * 100 - 1) // 32
    assert len(_folders(f"{corpus}_indices")) == 2


def test_interrupted_build_leaves_no_folder(corpus, settings, monkeypatch):
    monkeypatch.setattr(np, "save", lambda *arguments, **more: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    assert _folders(f"{corpus}_indices") == []
    monkeypatch.undo()
    assert len(datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train) > 0


def test_cache_folder_that_cannot_be_written(corpus, tmp_path):
    (tmp_path / "file").touch()
    settings = SampleSettings(1000, 0, 1234, cache_path=str(tmp_path / "file"))
    assert_rejected("data-cache-path", datasets_from_split, corpus, "1", LENGTHS, ONE_EPOCH, settings)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("content", [pickle.dumps(Payload()), b""], ids=["pickle", "empty"])
def test_damaged_and_hostile_indices(content, corpus, settings, tmp_path, monkeypatch):
    """Indices next to the data may come from someone else: nothing is unpickled."""
    monkeypatch.chdir(tmp_path)
    datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
    (folder,) = Path(f"{corpus}_indices").iterdir()
    (folder / "sample_index.npy").write_bytes(content)
    message = rf"sample_index\.npy: .*{folder.name}"
    assert_rejected(message, datasets_from_split, corpus, "1", LENGTHS, ONE_EPOCH, settings)
    assert not Path("executed").exists()


def test_every_machine_builds_a_folder_on_its_local_disk(tmp_path, as_rank, monkeypatch):
    """The folder of rank 0 is not visible to rank 1, and built by the first rank of its machine only."""
    folder, built = tmp_path / "indices", []
    as_rank(0)
    build_once(folder, built.append)
    folder.rmdir()
    as_rank(1)
    build_once(folder, built.append)
    assert folder.is_dir()
    assert len(built) == 2
    folder.rmdir()
    monkeypatch.setenv("LOCAL_RANK", "1")
    as_rank(0)
    build_once(folder, built.append)
    folder.rmdir()
    as_rank(1)
    build_once(folder, built.append)
    assert not folder.exists()
