"""The release's layout: its own weights give its own files again, with one or more tensor-parallel shards."""

import pytest
import torch

from megatron.checkpoint.directory import read_manifest
from megatron.checkpoint.storage import CheckpointError, load_file, read_json
from megatron.convert import to_release
from megatron.inference import load_model
from tests.support.conversion import LONG, make_model, quiet, random_tokens
from tests.support.release import METHODS, checkpoints


def layer_tensors(step) -> dict[str, torch.Tensor]:
    return {
        f"{path.name} {name}": tensor
        for path in sorted(step.glob("layer_*.pt"))
        for name, tensor in torch.load(path, weights_only=True).items()
    }


@pytest.mark.parametrize("pos_emb", METHODS)
def test_released_files_are_reproduced(pos_emb, tmp_path):
    model, config = load_model(checkpoints(pos_emb))
    to_release(model, config, tmp_path / "out", iteration=300, report=quiet)
    original = layer_tensors(checkpoints(pos_emb) / "global_step300")
    written = layer_tensors(tmp_path / "out" / "global_step300")
    assert "layer_00-model_00-model_states.pt" in read_manifest(tmp_path / "out" / "global_step300")
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        # The release's frequencies are float32 powers, whose last bit depends on the implementation.
        torch.testing.assert_close(written[name], tensor, rtol=1e-6 if "inv_freq" in name else 0, atol=0)


@pytest.mark.parametrize("pos_emb", ["kerple_power_ap_ap", "rpe", "alibi"])
@torch.no_grad()
def test_shards(pos_emb, tmp_path):
    model, config = make_model(pos_emb)
    to_release(model, config, tmp_path / "out", tensor_parallel=2, dtype=torch.bfloat16, report=quiet)
    step = tmp_path / "out" / "global_step0"
    shard = torch.load(step / "layer_02-model_01-model_states.pt", weights_only=True)
    assert shard["attention.query_key_value.weight"].shape == (48, 32)
    assert shard["attention.dense.weight"].shape == (32, 16)
    own = {name: tuple(tensor.shape) for name, tensor in shard.items() if "rpe" in name or "alibi" in name}
    assert (
        own
        == {
            "kerple_power_ap_ap": {
                f"attention.rpe.{name}": (2, 1, 1) for name in ("bias_a", "bias_p", "wei_a", "wei_p")
            },
            "rpe": {"attention.rpe.weight": (32, 2)},
            "alibi": {"attention.alibi_embed.slopes": (2,)},
        }[pos_emb]
    )
    assert {tensor.dtype for tensor in shard.values()} == {torch.bfloat16}
    assert (step / "mp_rank_01_model_states.pt").is_file()
    # Merge the shards again.
    back, config = load_model(tmp_path / "out")
    assert config.parallel.model_parallel_size == 1
    to_release(back, config, tmp_path / "merged", dtype=torch.bfloat16, report=quiet)
    tokens = random_tokens(1, LONG)
    expected = model.bfloat16().float()(tokens)
    assert torch.equal(back(tokens), expected)
    assert torch.equal(load_model(tmp_path / "merged")[0](tokens), expected)


@torch.no_grad()
def test_aliases_and_options_get_the_releases_names(tmp_path):
    model, config = make_model("kerple_bias_wht")
    to_release(model, config, tmp_path / "alias", report=quiet)
    assert load_model(tmp_path / "alias")[1].model.pos_emb == "kerple_power_ap_ap"
    model, config = make_model("rpe", pos_emb_options={"num_buckets": 8, "max_distance": 20})
    to_release(model, config, tmp_path / "options", report=quiet)
    loaded, written = load_model(tmp_path / "options")
    assert written.model.pos_emb_options == {}
    assert (written.model.rpe_num_buckets, written.model.rpe_max_distance) == (8, 20)
    tokens = random_tokens(1, LONG)
    assert torch.equal(loaded(tokens), model(tokens))


def test_unsupported_models(tmp_path, monkeypatch):
    model, config = make_model("alibi")
    with pytest.raises(CheckpointError, match="size 3 does not divide the 4 heads"):
        to_release(model, config, tmp_path / "out", tensor_parallel=3, report=quiet)
    from megatron.convert import release

    monkeypatch.setattr(release, "METHODS", ("none", "rotary"))
    with pytest.raises(CheckpointError, match="pos_emb alibi: not supported by the release"):
        to_release(model, config, tmp_path / "out", report=quiet)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"activation": "swiglu"}, "activation.*MLP"),
        ({"num_kv_heads": 2, "head_size": 16}, "num_kv_heads, head_size"),
        (
            {"use_bias_in_attn_output": False, "sliding_window_width": 5},
            "use_bias_in_attn_output, sliding_window_width",
        ),
    ],
)
def test_blocks_that_the_release_lacks(keys, name, tmp_path):
    model, config = make_model("rotary", **keys)
    with pytest.raises(CheckpointError, match=name):
        to_release(model, config, tmp_path / "release", report=quiet)


@pytest.mark.parametrize(
    "keys",
    [
        {"activation": "relu"},
        {"activation": "silu"},
        {"bias_gelu_fusion": True},
        {"norm": "rmsnorm", "rms_norm_epsilon": 1e-2},
        {"no_weight_tying": False},
    ],
)
@torch.no_grad()
def test_settings_of_blocks_are_in_the_configuration(keys, tmp_path):
    model, config = make_model("kerple_log", **keys)
    to_release(model, config, tmp_path / "out", report=quiet)
    loaded, written = load_model(tmp_path / "out")
    tokens = random_tokens(1, LONG)
    assert torch.equal(loaded(tokens), model(tokens))
    assert written.model.activation == config.model.activation
    values = read_json(tmp_path / "out/global_step0/configs/config.yml")
    assert values["activation"] == {"silu": "swish"}.get(config.model.activation, config.model.activation)


@torch.no_grad()
def test_rounded_distances_are_not_exported(tmp_path):
    model, config = make_model("kerple_log", release_bf16_distances=True)
    messages = []
    to_release(model, config, tmp_path / "out", report=messages.append)
    assert "release_bf16_distances is not exported" in messages[0]
    loaded, written = load_model(tmp_path / "out")
    assert not written.model.release_bf16_distances
    exact, _ = make_model("kerple_log")
    tokens = random_tokens(1, LONG)
    assert torch.equal(loaded(tokens), exact(tokens))


@torch.no_grad()
def test_ranks_share_the_biases_of_a_parallel_residual(tmp_path):
    """The release adds the bias of every rank."""
    model, config = make_model("kerple_log", gpt_j_residual=True)
    to_release(model, config, tmp_path / "out", tensor_parallel=2, report=quiet)
    step = tmp_path / "out/global_step0"
    shards = [torch.load(step / f"layer_02-model_0{rank}-model_states.pt", weights_only=True) for rank in (0, 1)]
    for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias"):
        assert torch.equal(shards[0][name] + shards[1][name], model.layers()[2].state_dict()[name])
    tokens = random_tokens(1, LONG)
    assert torch.equal(load_model(tmp_path / "out")[0](tokens), model(tokens))


def test_output_layer_and_norms_are_those_of_the_releases_code(tmp_path):
    model, config = make_model("kerple_log", norm="rmsnorm")
    to_release(model, config, tmp_path / "out", tensor_parallel=2, report=quiet)
    step = tmp_path / "out/global_step0"
    output = torch.load(step / "layer_06-model_00-model_states.pt", weights_only=True)
    assert output["final_linear.weight"].shape == (256, 32)
    # Its default, row, splits the hidden size.
    assert read_json(step / "configs/config.yml")["output_layer_parallelism"] == "column"
    block = torch.load(step / "layer_02-model_00-model_states.pt", weights_only=True)
    assert {name for name in block if "norm" in name} == {"input_layernorm.scale", "post_attention_layernorm.scale"}
    assert list(torch.load(step / "layer_05-model_00-model_states.pt", weights_only=True)) == ["norm.scale"]


def test_state_files_have_what_deepspeed_reads(tmp_path):
    model, config = make_model("kerple_log")
    to_release(model, config, tmp_path / "out", iteration=7, tensor_parallel=2, report=quiet)
    step = tmp_path / "out/global_step7"
    original = load_file(checkpoints("kerple_log") / "global_step300" / "mp_rank_00_model_states.pt")
    # Of a run: optimizer, random states, the number of samples. Of other versions of DeepSpeed: the rest.
    run = {name for name in original if name.endswith(("_rng_state", "_states"))} | {"global_samples"}
    later = {"param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "data_sampler"}
    later |= {"random_ltd", "checkpoint_parallel_dimensions", "ds_config", "ds_version"}
    for rank in (0, 1):
        state = load_file(step / f"mp_rank_0{rank}_model_states.pt")
        for name in original.keys() - run - later - {"optimizer"}:
            assert type(state[name]) is type(original[name]), name
        assert (state["iteration"], state["global_steps"], state["mp_world_size"]) == (7, 7, 2)
        assert state["optimizer"] is None
    values = read_json(step / "configs/config.yml")
    assert [values["no_load_optim"], values["no_load_rng"]] == [True, True]
    assert {name: values[name] for name in state["args"]} == state["args"]
