"""Training data on S3: a stand-in for boto3 on fsspec's memory file system, read by megatron-core's own code."""

import io
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest

from megatron.core.datasets import indexed_dataset
from megatron.data import build_loader, validation_stream
from megatron.data.datasets import datasets_from_blends, datasets_from_split
from megatron.data.samples import SampleSettings
from megatron.data.selection import Blend
from megatron.utils.errors import UserError

PREFIX = "s3://bucket/corpora/c"


class FakeClient:
    """The calls that are made of boto3's S3 client."""

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
    """The corpus, on S3 too."""
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
    loader = iter(build_loader(dataset, micro_batch_size=3, **options))
    return [next(loader)["tokens"].tolist() for _ in range(count)]


def test_the_same_samples_as_from_disk(tmp_path, corpus, s3):
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


def test_a_changed_corpus_is_fetched_again(tmp_path, s3, write_corpus):
    arguments = ("1", (32, 32, 32), (None, 0, 0), settings_at(tmp_path))
    before = len(datasets_from_split(PREFIX, *arguments).train)
    write_corpus(tmp_path / "new", [50] * 40)
    for ending in ("bin", "idx"):
        s3.store.pipe(f"/bucket/corpora/c.{ending}", (tmp_path / f"new.{ending}").read_bytes())
    after = datasets_from_split(PREFIX, *arguments).train
    assert len(after) == (50 * 40 - 1) // 32 != before
    assert s3.requests.count(("download", "corpora/c.idx")) == 2


def test_damage_and_absence(tmp_path, s3):
    arguments = ("1", (32, 32, 32), (None, 0, 0), settings_at(tmp_path))
    with pytest.raises(UserError, match=r"cannot read s3://bucket/corpora/absent.idx: "):
        datasets_from_split("s3://bucket/corpora/absent", *arguments)
    s3.store.pipe("/bucket/corpora/c.bin", s3.store.cat_file("/bucket/corpora/c.bin")[:-2])
    with pytest.raises(UserError, match=r"s3://bucket/corpora/c.bin is truncated"):
        datasets_from_split(PREFIX, *arguments)


def test_id_beyond_the_vocabulary(tmp_path, s3):
    datasets = datasets_from_split(PREFIX, "1", (32,) * 3, (None, 0, 0), settings_at(tmp_path, vocab_size=500))
    with pytest.raises(UserError, match=r"s3://.* but the vocabulary ends at 499"):
        batches(datasets.train)


def test_refused_by_name(tmp_path, s3, monkeypatch):
    arguments = ("1", (32, 32, 32), (None, 0, 0))
    with pytest.raises(UserError, match=r"data-path s3://bucket/corpora/c needs data-cache-path"):
        datasets_from_split(PREFIX, *arguments, SampleSettings(1000, 0, 1))
    with pytest.raises(UserError, match=r"gs://bucket/c: training reads from local disks and s3:// alone"):
        datasets_from_split("gs://bucket/c", *arguments, settings_at(tmp_path))
    with pytest.raises(UserError, match=r"c is on an object store, from where training alone reads"):
        validation_stream(PREFIX)
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UserError, match=r"needs the package boto3, which is not installed: pip install"):
        datasets_from_split(PREFIX, *arguments, settings_at(tmp_path))
    assert not np.any([kind == "get" for kind, _ in s3.requests])
