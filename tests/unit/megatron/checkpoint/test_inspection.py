"""Descriptions of checkpoints, compared with the models that load from them."""

import shutil

import pytest
import torch

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.inspection import check_finite, describe, head_values
from megatron.checkpoint.storage import CheckpointError
from megatron.inference import load_model
from tests.support.release import METHODS, checkpoints, split_for_ranks


def settings_of(step):
    return checkpoint_config(step).model


@pytest.mark.parametrize("method", METHODS)
def test_a_released_checkpoint(method):
    step = checkpoints(method) / "global_step300"
    description = describe(step, settings_of(step))
    model, _ = load_model(checkpoints(method))
    assert (description["iteration"], description["manifest"], description["tensor_parallel"]) == (
        300,
        "none",
        1,
    )
    assert description["optimizer"] == "the release's"
    if (
        method != "kerple_power_original"
    ):  # the release stores a constant of this model as a parameter
        assert description["parameters"] == sum(
            parameter.numel() for parameter in model.parameters()
        )
    (positional,) = model.positional_methods().values()
    expected = {name: values.tolist() for name, values in positional.statistics().items()}
    if "bias" in positional.hooks:
        expected["effective_length"] = positional.effective_length().tolist()
    assert description["kernels"] == ({"all layers": expected} if expected else {})


def test_tensor_parallel_shards_are_merged(tmp_path):
    """The release splits positional parameters by head."""
    model, _ = load_model(checkpoints("kerple_log"))
    original = checkpoints("kerple_log") / "global_step300"
    step = shutil.copytree(original, tmp_path / "global_step300")
    split_for_ranks(step, 2)
    description = describe(step, settings_of(step))
    assert description["tensor_parallel"] == 2
    assert description["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert description["kernels"] == head_values(original, settings_of(original))


def test_a_shared_method_is_read_from_any_layer(tmp_path):
    original = checkpoints("kerple_log") / "global_step300"
    step = shutil.copytree(original, tmp_path / "global_step300")
    (step / "layer_02-model_00-model_states.pt").unlink()
    assert head_values(step, settings_of(step)) == head_values(original, settings_of(original))


def test_tied_output_weights_are_counted_once(tmp_path):
    """Also if the checkpoint has a file for the output layer."""
    step = shutil.copytree(checkpoints("alibi") / "global_step300", tmp_path / "global_step300")
    config = checkpoint_config(step, {"no_weight_tying": False}).model
    model, _ = load_model(checkpoints("alibi"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (
        describe(step, config)["parameters"]
        == parameters - model.output.final_linear.weight.numel()
    )


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_slices_are_counted(value, tmp_path):
    """As after initialization: biases are 0 on all ranks."""
    model, _ = load_model(checkpoints("kerple_log"))
    step = shutil.copytree(
        checkpoints("kerple_log") / "global_step300", tmp_path / "global_step300"
    )
    for path in step.glob("layer_*.pt"):
        state = torch.load(path, weights_only=True)
        for name, tensor in state.items():
            if not name.startswith("attention.rpe"):
                tensor.fill_(value)
        torch.save(state, path)
    split_for_ranks(step, 2)
    assert describe(step)["parameters"] == sum(
        parameter.numel() for parameter in model.parameters()
    )
    file = step / "layer_02-model_01-model_states.pt"
    state = torch.load(file, weights_only=True)
    del state["mlp.dense_4h_to_h.bias"]
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: lacks mlp\.dense_4h_to_h\.bias"):
        describe(step)


def test_values_that_are_not_finite(tmp_path):
    step = shutil.copytree(checkpoints("alibi") / "global_step300", tmp_path / "global_step300")
    check_finite(step)
    file = step / "layer_03-model_00-model_states.pt"
    state = torch.load(file, weights_only=True)
    state["mlp.dense_h_to_4h.weight"][3, 4:6] = float("nan")
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: mlp\.dense_h_to_4h\.weight .*2"):
        check_finite(step)
