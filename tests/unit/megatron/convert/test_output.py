"""The output of a conversion appears only if it is complete and has the same logits."""

import pytest
import torch

from megatron.checkpoint.manifest import find_damage, find_valid_step
from megatron.checkpoint.storage import CheckpointError
from megatron.convert.output import (
    check_same_logits,
    compared_lengths,
    largest_difference,
    new_folder,
    with_float32_angles,
    write_checkpoint,
)
from megatron.utils.errors import UserError
from tests.support.checkpoints import VOCABULARY
from tests.support.conversion import make_model, random_tokens


def test_a_folder_appears_when_it_is_complete(tmp_path):
    with new_folder(tmp_path / "deep" / "out") as folder:
        (folder / "a").write_text("a")
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "a").read_text() == "a"


def test_what_a_killed_process_left_is_removed(tmp_path):
    """But not what a running one writes."""
    (tmp_path / ".out.unfinished-123" / "global_step0").mkdir(parents=True)
    with new_folder(tmp_path / "out") as folder:
        with pytest.raises(UserError, match=r"out: .*\(held by"):
            new_folder(tmp_path / "out").__enter__()
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_is_not_replaced(tmp_path):
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "a").write_text("new")
    with (
        pytest.raises(CheckpointError, match="empty: already exists"),
        new_folder(tmp_path / "empty"),
    ):
        pass
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"out: cannot write to .*file: Not a dir"),
        new_folder(tmp_path / "file" / "out"),
    ):
        pass


def test_a_checkpoint_has_a_manifest(tmp_path):
    model, _ = make_model("none")
    step = write_checkpoint(tmp_path, model, torch.bfloat16, {"num_layers": 2}, {})
    assert find_valid_step(tmp_path) == step
    assert find_damage(step) is None
    saved = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert (step / "mp_rank_00_model_states.pt").is_file()
    (step / "layer_00-model_00-model_states.pt").write_bytes(b"")
    assert "layer_00-model_00" in find_damage(step)


def test_different_logits_are_an_error():
    model, config = make_model("alibi")
    other, _ = make_model("alibi", seed=1)
    messages = []
    check_same_logits(model, model, VOCABULARY, config, "copy", messages.append)
    assert messages == ["copy: logits compared at length 32 and 128, largest difference 0.0e+00"]
    for wrong in (
        other,
        lambda tokens: model(tokens) * float("nan"),
        lambda tokens: model(tokens)[..., :3],
    ):
        with pytest.raises(CheckpointError, match=r"nothing was written.*logits differ by"):
            check_same_logits(model, wrong, VOCABULARY, config, "copy", messages.append)


def test_lengths_beyond_the_training_length_are_compared_if_supported():
    assert compared_lengths(make_model("alibi")[1]) == (32, 128)
    assert compared_lengths(make_model("learned")[1]) == (32,)
    for window, longer in ((8, 136), (500, 628), (4096, 4224), (4097, 128)):
        _, config = make_model("alibi", sliding_window_width=window - 1)
        assert config.model.window == window
        assert compared_lengths(config) == (32, longer)


def test_float32_angles_change_a_copy():
    model, _ = make_model("rotary")
    tokens = random_tokens(1, 64)
    with torch.no_grad():
        before = model(tokens)
        assert 0 < largest_difference(model, with_float32_angles(model), VOCABULARY, (4000,)) < 1e-2
        assert torch.equal(model(tokens), before)


def test_float32_frequencies_of_transformers_replace_equal_ones():
    """Only those that are the same except for rounding."""
    model, _ = make_model("rotary", pos_emb_options={"scaling": "linear", "factor": 3})
    own = model.blocks[0].attention.rpe.angles.frequencies
    rounded = torch.tensor(own) * (1 + 1e-6)
    for frequencies, expected in (
        (rounded, rounded.tolist()),
        (rounded * 1.001, own),
        (rounded[:2], own),
    ):
        copied = with_float32_angles(model, frequencies)
        assert copied.blocks[0].attention.rpe.angles.frequencies == tuple(expected)
    assert model.blocks[0].attention.rpe.angles.frequencies == own
