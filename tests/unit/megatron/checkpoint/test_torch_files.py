"""Hostile torch files are rejected by name and reason, before torch.load allocates what they claim to contain."""

import io
import zipfile

import pytest
import torch

from megatron.checkpoint.storage import CheckpointError, load_file, load_tensors, read_weights
from megatron.checkpoint.torch_files import check_tensors, check_zip_directory
from tests.support.hostile import hostile_tensors

WEIGHT = torch.arange(12.0).reshape(3, 4)


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """Apply `change` to the records (name -> bytes) of a zip file."""
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, content in change(records):
            target.writestr(name, content)


@pytest.mark.parametrize("legacy", [False, True])
def test_ordinary_files_are_accepted(legacy, tmp_path):
    value = {"w": WEIGHT, "half": WEIGHT.half(), "step": 3, "nested": [{"p": torch.nn.Parameter(WEIGHT)}, None, 0.5]}
    torch.save(value, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    loaded = load_tensors(tmp_path / "file.pt")
    assert torch.equal(loaded["w"], WEIGHT)
    assert torch.equal(loaded["nested"][0]["p"], WEIGHT)
    assert (loaded["step"], loaded["half"].dtype) == (3, torch.float16)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integer", r"torch\.int64.*float32"),
        ("boolean", r"torch\.bool"),
        ("complex", r"torch\.complex64"),
        ("float8", r"torch\.float8_e4m3fn"),
        ("meta", r"meta.*torch\.float32"),
        ("sparse", r"sparse_coo.*torch\.float32"),
        ("quantized", r"torch\._utils\._rebuild_qtensor"),
        ("expanded", r"torch\.float32.*1,000,000,000,000"),
    ],
)
def test_weights_are_dense_floating_point_tensors(kind, message, tmp_path):
    torch.save({"v": WEIGHT, "w": dict(hostile_tensors(WEIGHT))[kind]}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"file\.pt: .*{message}"):
        read_weights(tmp_path / "file.pt")


def test_compressed_records_are_not_inflated(tmp_path):
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", lambda records: records.items(), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="rejected because it has the compressed record file/"):
        load_tensors(tmp_path / "file.pt")


def test_storages_end_with_their_records(tmp_path):
    """Without a memory map, torch 2.13 reads beyond the record."""
    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", lambda records: [(n, c[:64] if "/data/" in n else c) for n, c in records.items()])
    with pytest.raises(CheckpointError, match=r"file\.pt: "):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL"])
def test_only_one_pickle(name, tmp_path):
    torch.save({"w": WEIGHT}, tmp_path / "file.pt")
    rewritten(tmp_path / "file.pt", lambda records: [(f"file/{name}", b"\x80\x02}."), *records.items()])
    with pytest.raises(CheckpointError, match="two records with the same name"):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("inserted", "message"),
    [
        (b"cbuiltins\nbytearray\n\x8a\x05\0\0\0\0\x04\x85R0", r"builtins\.bytearray"),
        (b"c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R0", r"__builtin__\.bytearray"),
        (b"]" * (5 << 20), r"data\.pkl.*5"),
    ],
)
def test_pickles_that_allocate_memory(inserted, message, tmp_path):
    torch.save({"w": WEIGHT}, tmp_path / "file.pt")

    def insert(records):
        return [(n, c[:2] + inserted + c[2:] if n.endswith("data.pkl") else c) for n, c in records.items()]

    rewritten(tmp_path / "file.pt", insert)
    for read in (load_tensors, load_file):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "file.pt")


def test_large_and_ambiguous_zip_directories():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as opened:
        opened.writestr("a", b"1")
        opened.comment = b"comments are allowed"
    check_zip_directory(stream)
    data = stream.getvalue()
    for changed in (b"", data[:-1], data + b"x", b"x" + data, data[:-30]):
        with pytest.raises(ValueError, match="zip"):
            check_zip_directory(io.BytesIO(changed))


def test_shared_and_recursive_containers_are_checked_once():
    value: list = [WEIGHT]
    for _ in range(200):
        value = [value, value]
    value.append(value)
    check_tensors(value)
    with pytest.raises(ValueError, match=r"has a\.1\.b of torch.float32, whose"):
        check_tensors({"a": [1, {"b": torch.ones(1).expand(10, 10)}]})
