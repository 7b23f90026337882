"""Reading never executes a file; errors name it; writing records what is on disk."""

import io
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


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


WHOLE = saved({"w": torch.ones(1000)})


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (load_tensors, None, "no such file"),
        (read_json, None, "No such file"),
        (read_json, b"{", "is not valid JSON"),
        (read_json, b"[1]", "is not a JSON object"),
        (read_weights, saved([1]), "contains a list instead of named tensors"),
        (read_weights, saved({"w": 3}), "has w of type int, not a tensor"),
        *(
            (
                read_weights,
                saved({"v": torch.ones(2), "w": torch.ones(2).to(dtype)}),
                f"has w of {dtype}",
            )
            for dtype in (torch.int64, torch.float8_e4m3fn)
        ),
        *(
            (read, content, "(rejected|cannot be read)")
            for read in READERS
            for content in (
                b"",
                b"text",
                b"PK\x03\x04 cut short",
                WHOLE[: len(WHOLE) // 2],
                pickle.dumps({"x": Exploit("nowhere")}),
            )
        ),
    ],
)
def test_files_that_cannot_be_read(read, content, message, tmp_path):
    """No message recommends to execute the file."""
    path = tmp_path / "file.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"file\.pt.* {message}") as caught:
        read(path)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)


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
