"""Layer files: merging and slicing tensor-parallel shards, and what does not fit a model."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.checkpoint.directory import layer_file
from megatron.checkpoint.layers import (
    check_sizes,
    embedding_rows,
    layer_state,
    load_layers,
    merge_shards,
    open_layers,
    weight_layers,
)
from megatron.checkpoint.storage import CheckpointError
from megatron.model.gpt import GPT
from tests.support.language_models import small_gpt
from tests.support.release import split_for_ranks

WHERE = Path("global_step1/layer_02-model_00-model_states.pt")


def save(model, step: Path) -> Path:
    step.mkdir()
    for index, layer in weight_layers(model.layers(), model.settings.config).items():
        torch.save(layer_state(layer), layer_file(step, index, 0))
    return step


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_concatenated_where_their_sizes_add_up(dim):
    full = torch.arange(24.0).view(4, 6)
    assert torch.equal(merge_shards("w", full.chunk(2, dim), full.shape, WHERE), full)


def test_shards_of_other_sizes_are_replicas_or_do_not_fit():
    shards = [torch.ones(3), torch.ones(3)]
    assert merge_shards("bias", shards, torch.Size([3]), WHERE) is shards[0]
    with pytest.raises(CheckpointError, match=r"layer_02.*2, 3.*4"):
        merge_shards("w", [torch.ones(2, 3)] * 2, torch.Size([4, 4]), WHERE)


def test_saved_tensors_have_a_storage_of_their_own():
    """torch.save writes the whole storage of a tensor."""
    layer = nn.Linear(4, 4)
    layer.register_parameter("view", nn.Parameter(torch.ones(100)[:3]))
    state = layer_state(layer)
    assert state["view"].untyped_storage().nbytes() == 12
    assert state["weight"].data_ptr() == layer.weight.data_ptr()


@pytest.mark.parametrize("pos_emb", ["kerple_log", "rotary", "learned"])
def test_a_model_is_filled_from_its_files(pos_emb, tmp_path):
    source, target = small_gpt(pos_emb, seed=1), small_gpt(pos_emb, seed=2)
    step = save(source, tmp_path / "global_step1")
    assert embedding_rows(open_layers(step), step) == source.settings.padded_vocab_size
    check_sizes(step, target.settings)
    load_layers(weight_layers(target.layers(), target.settings.config), step)
    assert all(
        torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 64}, r"layer_00.*word_embeddings\.weight"),
        ({"num_layers": 1}, "last layer file has index 6, .* would have 5"),
        ({"num_layers": 3}, "last layer file has index 6, .* would have 7"),
        ({"padded_vocab_size": 256}, r"layer_00.*word_embeddings\.weight"),
        ({"pos_emb": "alibi"}, r"layer_02.*attention\.rpe\.bias_p"),
        ({"pos_emb": "rpe"}, r"layer_02.*attention\.rpe\.weight.*attention\.rpe\.bias_p"),
    ],
)
def test_differences_from_the_configured_model_are_named(keys, message, tmp_path):
    step = save(small_gpt("kerple_log"), tmp_path / "global_step1")
    with pytest.raises(CheckpointError, match=message):
        check_sizes(step, small_gpt(keys.pop("pos_emb", "kerple_log"), **keys).settings)


def test_missing_files_are_named(tmp_path):
    step = save(small_gpt("none"), tmp_path / "global_step1")
    torch.save({}, layer_file(step, 3, 1))
    with pytest.raises(CheckpointError, match="layer_00-model_01"):
        open_layers(step)
    layer_file(step, 3, 1).unlink()
    layer_file(step, 2, 0).unlink()
    with pytest.raises(CheckpointError, match="layer_02-model_00"):
        check_sizes(step, small_gpt("none").settings)
    layer_file(step, 0, 0).unlink()
    with pytest.raises(CheckpointError, match=r"layer_00.*word_embeddings\.weight"):
        embedding_rows(open_layers(step), step)


def write_layer(step: Path, index: int, *states: dict[str, torch.Tensor]) -> None:
    for rank, state in enumerate(states):
        torch.save(state, layer_file(step, index, rank))


def test_an_output_layer_that_the_configured_model_ties_must_equal_the_embedding(tmp_path):
    untied, tied = small_gpt("none"), small_gpt("none", no_weight_tying=False)
    step = save(untied, tmp_path / "global_step1")
    with pytest.raises(CheckpointError, match=r'layer_06.*"no-weight-tying"'):
        check_sizes(step, tied.settings)
    embedding = untied.state_dict()["0.word_embeddings.weight"]
    write_layer(step, 6, {"final_linear.weight": embedding})
    check_sizes(step, tied.settings)
    write_layer(step, 6, {"word_embeddings.weight": embedding})
    check_sizes(step, tied.settings)
    write_layer(step, 6, {})
    with pytest.raises(CheckpointError, match='"no-weight-tying"'):
        check_sizes(step, tied.settings)


@pytest.mark.parametrize(
    ("pos_emb", "fix"), [("kerple_log", '"parameters": "per-layer"'), ("rpe", '"per_layer"')]
)
def test_layers_that_share_a_method_must_have_the_same_parameters(pos_emb, fix, tmp_path):
    model = small_gpt(pos_emb)
    step = save(model, tmp_path / "global_step1")
    check_sizes(step, model.settings)
    state = layer_state(model.layers()[3])
    name = next(name for name in state if name.startswith("attention.rpe."))
    write_layer(step, 3, {**state, name: state[name] * 1.5})
    with pytest.raises(CheckpointError, match=rf"layer_03.* {name} .*{fix}"):
        check_sizes(step, model.settings)
    check_sizes(step, model.settings, positional=False)
    if pos_emb == "kerple_log":
        check_sizes(step, small_gpt(pos_emb, pos_emb_options={"parameters": "per-layer"}).settings)


NEOX_STATE = {"iteration": 1, "dp_world_size": 1}


def save_shards(
    model: GPT, step: Path, ranks: int, state_file: dict[str, object] | None = NEOX_STATE
) -> Path:
    """Write the layers' tensors for each tensor-parallel rank."""
    save(model, step)
    split_for_ranks(step, ranks)
    if state_file is not None:
        torch.save(state_file, step / "mp_rank_00_model_states.pt")
    return step


def change(step: Path, index: int, rank: int, **changes: float) -> None:
    """Multiply tensors of a layer file, named with _ instead of dots."""
    path = layer_file(step, index, rank)
    state = torch.load(path, weights_only=True)
    torch.save(
        {name: tensor * changes.get(name.replace(".", "_"), 1) for name, tensor in state.items()},
        path,
    )


def loaded(model: GPT, step: Path) -> GPT:
    """Another model of the same settings, filled from the checkpoint."""
    target = GPT(model.settings).eval()
    check_sizes(step, target.settings)
    load_layers(weight_layers(target.layers(), target.settings.config), step)
    return target


def by_kind(rows: Tensor, groups: int, size: int) -> Tensor:
    """The rows of query_key_value of a rank, from this project's order to GPT-NeoX's,
    head by head.
    """
    heads = list(rows.split(size))
    per_group = len(heads) // groups
    queries = [head for number, head in enumerate(heads) if number % per_group < per_group - 2]
    keys = [head for number, head in enumerate(heads) if number % per_group == per_group - 2]
    values = [head for number, head in enumerate(heads) if number % per_group == per_group - 1]
    return torch.cat([*queries, *keys, *values])


@pytest.mark.parametrize("parallel_residual", [True, False])
def test_biases_that_ranks_add_before_their_sum(parallel_residual, tmp_path):
    model = small_gpt("none", gpt_j_residual=parallel_residual)
    step = save_shards(model, tmp_path / "global_step1", 2)
    for name in ("attention_dense_bias", "mlp_dense_4h_to_h_bias") if parallel_residual else ():
        for rank, factor in ((0, 0.25), (1, 0.75)):
            change(step, 2, rank, **{name: factor})
            change(step, 3, rank, **{name: factor})
    for name, tensor in loaded(model, step).state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], msg=name)
    # A checkpoint of this project has the whole bias on each rank.
    torch.save({"training": {}}, step / "mp_rank_00_model_states.pt")
    if parallel_residual:
        with pytest.raises(CheckpointError, match=r"attention\.dense\.bias.*tensor-parallel"):
            loaded(model, step)
        own = loaded(model, save_shards(model, tmp_path / "own", 2, {"training": {}}))
        assert torch.equal(
            own.layers()[2].mlp.dense_4h_to_h.bias, model.layers()[2].mlp.dense_4h_to_h.bias
        )


def test_norms_of_ranks_that_were_trained_apart_are_averaged(tmp_path):
    model = small_gpt("none")
    step = save_shards(model, tmp_path / "global_step1", 2)
    change(step, 3, 1, input_layernorm_weight=1.5)
    change(step, 5, 1, norm_bias=3)
    target = loaded(model, step)
    expected = model.layers()[3].input_layernorm.weight * 1.25
    torch.testing.assert_close(target.layers()[3].input_layernorm.weight, expected)
    torch.testing.assert_close(target.layers()[5].norm.bias, model.layers()[5].norm.bias * 2)


def test_copies_of_other_tensors_must_be_equal(tmp_path):
    model = small_gpt("learned", max_positions=32)
    step = save_shards(model, tmp_path / "global_step1", 2)
    change(step, 2, 1, mlp_dense_4h_to_h_bias=1.0001)  # rounding
    loaded(model, step)
    for factor in (2, math.nan):
        change(step, 2, 1, mlp_dense_4h_to_h_bias=factor)
        with pytest.raises(CheckpointError, match=r"layer_02-model_00.*mlp\.dense_4h_to_h\.bias"):
            loaded(model, step)
    change(step, 2, 0, mlp_dense_4h_to_h_bias=math.nan)
    loaded(model, step)  # equal copies, of a run that has diverged


@pytest.mark.parametrize("ranks", [1, 2])
@torch.no_grad()
def test_grouped_query_attention_in_the_order_of_gpt_neox(ranks, tmp_path):
    model = small_gpt("rotary", num_kv_heads=2)
    step = save_shards(model, tmp_path / "global_step1", ranks)
    for index in (2, 3):
        for rank in range(ranks):
            path = layer_file(step, index, rank)
            state = torch.load(path, weights_only=True)
            for name in ("attention.query_key_value.weight", "attention.query_key_value.bias"):
                state[name] = by_kind(state[name], 2 // ranks, model.settings.config.head_size)
            torch.save(state, path)
    tokens = torch.arange(40)[None]
    assert torch.equal(loaded(model, step)(tokens), model(tokens))
    # Checkpoints of this project, and those that its converters write, have its own order.
    for number, own in enumerate(({"training": {}}, {"iteration": 0})):
        converted = save_shards(model, tmp_path / f"own{number}", ranks, own)
        assert torch.equal(loaded(model, converted)(tokens), model(tokens))
    (step / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_00.*num_kv_heads"):
        loaded(model, step)


def test_scales_of_an_rms_norm(tmp_path):
    model = small_gpt("none", norm="rmsnorm")
    step = save_shards(model, tmp_path / "global_step1", 1)
    for index in (2, 3, 5):
        path = layer_file(step, index, 0)
        state = torch.load(path, weights_only=True)
        names = {name: name.replace("norm.weight", "norm.scale") for name in state}
        torch.save({names[name]: tensor for name, tensor in state.items()}, path)
    state = loaded(model, step).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
