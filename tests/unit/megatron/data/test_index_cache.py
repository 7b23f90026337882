"""The cache of sample indices, and training data on S3 (a fake of boto3 on fsspec's in-memory file system)."""

import io
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset
from megatron.data.datasets import SampleSettings, datasets_from_blends, datasets_from_split
from megatron.data.index_cache import build_once
from megatron.data.loader import Loader
from megatron.data.splits import Blend
from megatron.utils import ranks
from megatron.utils.errors import UserError
from tests.support.corpora import part_tokens
from tests.support.errors import assert_rejected

LENGTHS = (32, 32, 32)
ONE_EPOCH = (None, None, None)

# --- sample indices


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


@pytest.fixture
def as_rank(monkeypatch):
    """as_rank(0), then as_rank(1), run the same code on two simulated ranks. Rank 1 receives what rank 0 broadcast.
    Both are the first rank of their machine.
    """
    broadcasts: list[bytes] = []
    state = SimpleNamespace(rank=0)

    def broadcast(message, src):
        if state.rank == 0:
            broadcasts.append(pickle.dumps(message))
        else:
            message[:] = pickle.loads(broadcasts.pop(0))

    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: state.rank)
    monkeypatch.setattr(ranks.dist, "broadcast_object_list", broadcast)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(
        ranks.dist, "all_gather_object", lambda outcomes, outcome: outcomes.__setitem__(slice(None), [outcome])
    )
    return lambda rank: setattr(state, "rank", rank)


def test_every_machine_builds_its_own_indices(corpus, tmp_path, as_rank):
    """The ranks, the first ones of their machines, do not see each other's folders."""
    samples = []
    for rank in (0, 1):
        as_rank(rank)
        settings = SampleSettings(1000, 0, 1234, cache_path=str(tmp_path / str(rank)))
        train = datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings).train
        samples.append([train[index]["tokens"].tolist() for index in range(10)])
        assert len(_folders(tmp_path / str(rank))) == 1
    assert samples[0] == samples[1]


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
    with pytest.raises(UserError, match=rf"sample_index\.npy: .*{folder.name}"):
        datasets_from_split(corpus, "1", LENGTHS, ONE_EPOCH, settings)
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


# --- data on S3


PREFIX = "s3://bucket/corpora/c"


class FakeClient:
    """The methods of boto3's S3 client that are used."""

    def __init__(self, store, requests):
        self.store, self.requests = store, requests

    def head_object(self, Bucket, Key):
        self.requests.append(("head", Key))
        content = self.store.cat_file(f"/{Bucket}/{Key}")
        return {"ContentLength": len(content), "ETag": str(hash(content))}

    def download_file(self, Bucket, Key, Filename):
        self.requests.append(("download", Key))
        Path(Filename).write_bytes(self.store.cat_file(f"/{Bucket}/{Key}"))

    def get_object(self, Bucket, Key, Range):
        start, end = map(int, Range.removeprefix("bytes=").split("-"))
        self.requests.append(("get", end + 1 - start))
        return {"Body": io.BytesIO(self.store.cat_file(f"/{Bucket}/{Key}")[start : end + 1])}

    def close(self):
        pass


@pytest.fixture
def s3(monkeypatch, corpus):
    """A copy of the corpus on S3."""
    store, requests = fsspec.filesystem("memory"), []
    store.store.clear()
    boto3 = SimpleNamespace(client=lambda service: FakeClient(store, requests))
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    monkeypatch.setattr(indexed_dataset, "boto3", boto3, raising=False)
    for ending in ("bin", "idx"):
        store.pipe(f"/bucket/corpora/c.{ending}", Path(f"{corpus}.{ending}").read_bytes())
    yield SimpleNamespace(store=store, requests=requests)
    store.store.clear()


def settings_at(tmp_path, vocab_size=1000) -> SampleSettings:
    return SampleSettings(vocab_size, 0, 1234, cache_path=str(tmp_path / "cache"))


def batches(dataset, count=5, **options):
    loader = iter(Loader(dataset, micro_batch_size=3, **options))
    return [next(loader)["tokens"].tolist() for _ in range(count)]


def test_s3_gives_the_same_samples_as_local_files(tmp_path, corpus, s3):
    arguments = ("8,1,1", (32, 32, 32), (None, None, 0), settings_at(tmp_path))
    remote, local = datasets_from_split(PREFIX, *arguments), datasets_from_split(corpus, *arguments)
    assert len(remote.train) == len(local.train)
    assert batches(remote.train) == batches(local.train)
    assert batches(remote.valid) == batches(local.valid)
    assert batches(remote.train, num_workers=1) == batches(local.train)
    assert batches(pickle.loads(pickle.dumps(remote.train))) == batches(local.train)
    assert s3.requests.count(("download", "corpora/c.idx")) == 1
    blend = [Blend((PREFIX, corpus), (1.0, 2.0)), None, None]
    assert len(datasets_from_blends(blend, (32,) * 3, (20, 0, 0), settings_at(tmp_path)).train) == 20


def test_changed_corpus_on_s3_is_downloaded_again(tmp_path, s3, write_corpus):
    arguments = ("1", (32, 32, 32), (None, 0, 0), settings_at(tmp_path))
    before = len(datasets_from_split(PREFIX, *arguments).train)
    write_corpus(tmp_path / "new", [50] * 40)
    for ending in ("bin", "idx"):
        s3.store.pipe(f"/bucket/corpora/c.{ending}", (tmp_path / f"new.{ending}").read_bytes())
    after = datasets_from_split(PREFIX, *arguments).train
    assert len(after) == (50 * 40 - 1) // 32 != before
    assert s3.requests.count(("download", "corpora/c.idx")) == 2


def test_damaged_and_missing_files_on_s3(tmp_path, s3):
    arguments = ("1", (32, 32, 32), (None, 0, 0), settings_at(tmp_path))
    assert_rejected(r"s3://bucket/corpora/absent\.idx", datasets_from_split, "s3://bucket/corpora/absent", *arguments)
    s3.store.pipe("/bucket/corpora/c.bin", s3.store.cat_file("/bucket/corpora/c.bin")[:-2])
    assert_rejected(r"s3://bucket/corpora/c\.bin", datasets_from_split, PREFIX, *arguments)


def test_id_beyond_the_vocabulary_on_s3(tmp_path, s3):
    datasets = datasets_from_split(PREFIX, "1", (32,) * 3, (None, 0, 0), settings_at(tmp_path, vocab_size=500))
    assert_rejected("s3://.*499", batches, datasets.train)


def test_unsupported_stores_and_missing_settings(tmp_path, s3, monkeypatch):
    arguments = ("1", (32, 32, 32), (None, 0, 0))
    with pytest.raises(UserError, match=r"data-path s3://bucket/corpora/c.*data-cache-path"):
        datasets_from_split(PREFIX, *arguments, SampleSettings(1000, 0, 1))
    assert_rejected("gs://bucket/c.*s3://", datasets_from_split, "gs://bucket/c", *arguments, settings_at(tmp_path))
    with pytest.raises(UserError, match="c is on an object store"):
        part_tokens(PREFIX)
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert_rejected("boto3", datasets_from_split, PREFIX, *arguments, settings_at(tmp_path))
    assert not np.any([kind == "get" for kind, _ in s3.requests])
