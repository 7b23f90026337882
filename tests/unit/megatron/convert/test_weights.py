"""Tensor names in both directions, and tensors that do not fit the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron.checkpoint.storage import CheckpointError
from megatron.convert.weights import (
    check_tensors,
    fill,
    hugging_face_names,
    hugging_face_tensors,
    read_hugging_face,
)
from tests.support.conversion import make_model

SOURCE = Path("folder")


@pytest.mark.parametrize(
    ("pos_emb", "expected"),
    [
        ("kerple_log", {"gpt_neox.positional.bias_p"}),
        ("learned", {"gpt_neox.positional.weight"}),
        (
            "dape_kerple",
            {f"gpt_neox.layers.{block}.attention.positional.first.weight" for block in (0, 1)},
        ),
        ("none", set()),
    ],
)
def test_every_tensor_has_a_name(pos_emb, expected):
    model, _ = make_model(pos_emb)
    names = set(hugging_face_names(model).values())
    positional = {name for name in names if "positional." in name}
    assert expected <= positional
    assert bool(expected) == bool(positional)
    assert {
        "gpt_neox.embed_in.weight",
        "embed_out.weight",
        "gpt_neox.layers.1.mlp.dense_4h_to_h.bias",
    } <= names
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1"}


def test_export_and_import_restore_the_tensors():
    model, other = make_model("rpe", seed=1)[0], make_model("rpe", seed=2)[0]
    tensors = hugging_face_tensors(model, torch.float32)
    fill(other, tensors)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_tied_output_weights_may_be_in_the_file():
    model, _ = make_model("none", no_weight_tying=False)
    tensors = hugging_face_tensors(model, torch.float32)
    assert "embed_out.weight" not in tensors
    embedding = tensors["gpt_neox.embed_in.weight"]
    check_tensors(model, {**tensors, "embed_out.weight": embedding.clone()}, SOURCE)
    with pytest.raises(CheckpointError, match=r"embed_out\.weight.*gpt_neox\.embed_in\.weight"):
        check_tensors(model, {**tensors, "embed_out.weight": embedding + 1}, SOURCE)


def test_aliases_and_computed_tensors(tmp_path):
    tensors = {
        "lm_head.weight": torch.ones(2),
        "gpt_neox.layers.0.attention.masked_bias": torch.ones(1),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert list(read_hugging_face(tmp_path)) == ["embed_out.weight"]


def test_an_index_names_files_of_the_folder_only(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../other/model.safetensors"}}'
    )
    with pytest.raises(CheckpointError, match=r"'\.\./other/model\.safetensors'"):
        read_hugging_face(tmp_path)
