"""Optimizer files: joining fragments of any layout, and the released optimizer's numbered
parameters.
"""

import pytest
import torch
from torch import nn

from megatron.checkpoint.optimizer import (
    optimizer_file,
    optimizer_fragments,
    parameter_names,
    read_optimizer,
    read_original_optimizer,
)
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.inference import load_model
from tests.support.language_models import small_gpt
from tests.support.release import checkpoints

STATE_TENSORS = ("exp_avg", "exp_avg_sq")


def write(step, rank, tensor_rank, **entries):
    step.mkdir(exist_ok=True)
    torch.save({"tensor_rank": tensor_rank, "parameters": entries}, step / optimizer_file(rank))


def fragment(full, start, end, shape=None):
    shape = tuple(full.shape) if shape is None else shape
    return {"shape": shape, "start": start, "step": 7, "exp_avg": full.flatten()[start:end].clone()}


@pytest.mark.parametrize("pos_emb", ["kerple_log", "dape_kerple", "learned", "none"])
def test_every_parameter_has_one_name(pos_emb):
    model = small_gpt(pos_emb)
    names = parameter_names(model.layers(), None)
    assert sorted(map(id, names.values())) == sorted(map(id, model.parameters()))
    assert ("positional.bias_p" in names) == (pos_emb == "kerple_log")


def test_tied_output_weights_have_the_name_of_the_embedding():
    model = small_gpt("none", no_weight_tying=False)
    last_stage = {index: layer for index, layer in model.layers().items() if index > 2}
    names = parameter_names(last_stage, model.settings.config.num_layers + 4)
    assert names["0.word_embeddings.weight"] is model.output.final_linear.weight


def test_fragments_and_slices_are_joined(tmp_path):
    """Two tensor-parallel slices, one of them in two fragments that overlap."""
    full = torch.arange(24.0).view(4, 6)
    upper, lower = full[:2], full[2:]
    write(tmp_path, 0, 0, w=fragment(upper, 0, 8))
    write(tmp_path, 1, 0, w=fragment(upper, 5, 12))
    write(tmp_path, 2, 1, w=fragment(lower, 0, 12))
    saved = read_optimizer(tmp_path)
    assert saved.step("w") == 7
    assert saved.has("w", "exp_avg")
    assert not saved.has("w", "master")
    assert torch.equal(saved.tensor("w", "exp_avg", full.shape), full)


def test_a_missing_fragment_is_named(tmp_path):
    full = torch.arange(12.0)
    write(tmp_path, 0, 0, w=fragment(full, 0, 4))
    write(tmp_path, 2, 0, w=fragment(full, 8, 12))
    with pytest.raises(CheckpointError, match="4 of the 12 elements of w"):
        read_optimizer(tmp_path).tensor("w", "exp_avg", full.shape)


def test_fragments_of_a_torch_optimizer():
    class Engine:
        def __init__(self, parameters):
            self.optimizer = torch.optim.Adam(parameters)

        def zero_optimization_partition_weights(self):
            return False

    parameters = {"a": nn.Parameter(torch.ones(2, 3)), "b": nn.Parameter(torch.ones(4))}
    fragments = optimizer_fragments(Engine(parameters.values()), parameters)
    assert {
        name: (item.shape, item.start, item.master.numel()) for name, item in fragments.items()
    } == {
        "a": ((2, 3), 0, 6),
        "b": ((4,), 0, 4),
    }
    assert fragments["a"].of(torch.arange(6.0).view(2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("method", ["kerple_log", "rpe", "learned"])
def test_the_releases_state_is_found_by_name(method):
    step = checkpoints(method) / "global_step300"
    saved = load_file(step / "mp_rank_00_model_states.pt")
    optimizer, reason = read_original_optimizer(saved, step, None, STATE_TENSORS)
    assert reason is None
    model, _ = load_model(checkpoints(method))
    for name, parameter in parameter_names(model.layers(), None).items():
        assert optimizer.has(name, "exp_avg"), name
        assert optimizer.tensor(name, "exp_avg", parameter.shape).shape == parameter.shape
        assert optimizer.step(name) == 300


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: None, "has no optimizer state"),
        (lambda state: {"fp32_flat": 1}, "not that of torch's Adam"),
        (
            lambda state: {**state, "param_groups": state["param_groups"] * 2},
            "several parameter groups",
        ),
        (
            lambda state: {**state, "param_groups": [{"params": [0, 1]}]},
            "has 2 parameters, but the layer files have",
        ),
        (
            lambda state: {**state, "state": {}},
            "its parameter 0 does not have the shape of 0.word_embeddings.weight",
        ),
    ],
)
def test_a_state_that_does_not_fit_has_a_reason(change, reason):
    step = checkpoints("kerple_log") / "global_step300"
    state = load_file(step / "mp_rank_00_model_states.pt")["optimizer"]
    _, actual = read_original_optimizer({"optimizer": change(state)}, step, None, STATE_TENSORS)
    assert reason in actual


def test_the_state_of_a_model_with_grouped_query_attention_is_not_used(tmp_path):
    """GPT-NeoX orders the rows of its queries, keys and values differently."""
    torch.save(
        {"attention.query_key_value.weight": torch.ones(16, 8)},
        tmp_path / "layer_02-model_00-model_states.pt",
    )
    saved = {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}
    _, reason = read_original_optimizer(saved, tmp_path, None, STATE_TENSORS)
    assert reason.startswith("num_kv_heads: ")
