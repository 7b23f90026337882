"""Reading never executes a file; errors name it; writing records what is on disk."""

import pickle
import zlib

import numpy as np
import pytest
import torch

from megatron.checkpoint.storage import (
    CheckpointError,
    FileRecord,
    file_record,
    load_file,
    load_tensors,
    read_json,
    read_weights,
    save_file,
)
from tests.support.checkpoints import Exploit

READERS = [load_file, load_tensors]


def test_the_exploit_works_without_protection(tmp_path):
    torch.save({"w": Exploit(tmp_path / "written")}, tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "written").read_text() == "executed"


@pytest.mark.parametrize("form", ["zip", "pickle"])
@pytest.mark.parametrize("read", READERS)
def test_exploits_are_rejected(form, read, tmp_path):
    path, target = tmp_path / "file.pt", tmp_path / "written"
    if form == "zip":
        torch.save({"w": torch.ones(3), "x": Exploit(target)}, path)
    else:
        path.write_bytes(pickle.dumps({"x": Exploit(target)}))
    with pytest.raises(CheckpointError, match=r"file\.pt: rejected"):
        read(path)
    assert not target.exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "content", [b"", b"text", b"PK\x03\x04 cut short", pickle.dumps({"x": Exploit("nowhere")})]
)
def test_no_message_recommends_executing_the_file(read, content, tmp_path):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.pt: (rejected|cannot be read)") as caught:
        read(tmp_path / "file.pt")
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_damaged(tmp_path):
    torch.save({"w": torch.ones(1000)}, tmp_path / "file.pt")
    data = (tmp_path / "file.pt").read_bytes()
    (tmp_path / "file.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"file\.pt: cannot be read") as caught:
        load_tensors(tmp_path / "file.pt")
    assert "weights_only" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"missing\.pt: no such file"):
        load_tensors(tmp_path / "missing.pt")


def test_data_classes_of_deepspeed_and_numpy_are_loaded(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    torch.save(
        {"scaler": LossScaler(scale=8.0), "random": np.arange(3, dtype=np.uint32)},
        tmp_path / "file.pt",
    )
    content = load_file(tmp_path / "file.pt")
    assert content["scaler"].cur_scale == 8.0
    assert content["random"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="rejected"):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "contains a list instead of named tensors"),
        ({"w": 3}, "has w of type int, not a tensor"),
    ],
)
def test_layer_files_contain_named_tensors(content, message, tmp_path):
    torch.save(content, tmp_path / "layer.pt")
    with pytest.raises(CheckpointError, match=message):
        read_weights(tmp_path / "layer.pt")


@pytest.mark.parametrize("zip_checksums", [True, False])
def test_the_record_is_that_of_the_file(zip_checksums, tmp_path):
    value = {"w": torch.arange(1000.0), "step": 3}
    record = save_file(tmp_path / "file.pt", value, zip_checksums=zip_checksums)
    data = (tmp_path / "file.pt").read_bytes()
    assert record == file_record(tmp_path / "file.pt") == FileRecord(len(data), zlib.crc32(data))
    assert torch.equal(load_tensors(tmp_path / "file.pt")["w"], value["w"])
    assert torch.serialization.get_crc32_options()


def test_a_full_disk_raises_its_own_error():
    with pytest.raises(OSError, match="No space left"):
        save_file("/dev/full", {"w": torch.ones(100_000)})


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"{", "is not valid JSON"), (b"[1]", "is not a JSON object")],
)
def test_json_errors_name_the_file(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.json.* {message}"):
        read_json(tmp_path / "a.json")


WEIGHT = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("legacy", [False, True])
def test_ordinary_files_are_accepted(legacy, tmp_path):
    value = {
        "w": WEIGHT,
        "half": WEIGHT.half(),
        "step": 3,
        "nested": [{"p": torch.nn.Parameter(WEIGHT)}, None, 0.5],
    }
    torch.save(value, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    loaded = load_tensors(tmp_path / "file.pt")
    assert torch.equal(loaded["w"], WEIGHT)
    assert torch.equal(loaded["nested"][0]["p"], WEIGHT)
    assert (loaded["step"], loaded["half"].dtype) == (3, torch.float16)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_weights_have_a_floating_point_dtype_of_models(dtype, tmp_path):
    torch.save({"v": WEIGHT, "w": WEIGHT.to(dtype)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"file\.pt: has w of {dtype}"):
        read_weights(tmp_path / "file.pt")
