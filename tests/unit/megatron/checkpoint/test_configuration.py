"""The configuration saved with a checkpoint, and its comparison with another one."""

import json
import re
from functools import partial

import pytest
import torch

from megatron.checkpoint.configuration import (
    OUTPUT_SETTINGS,
    check_trained_data,
    check_trained_tokenizer,
    checkpoint_config,
    files_notice,
    model_differences,
    replaces_positional_method,
)
from megatron.checkpoint.directory import STATE_FILE
from megatron.checkpoint.manifest import find_damage, read_manifest, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError
from megatron.config import Config, UserError
from megatron.config.schema.model import ModelConfig
from megatron.tokenizer.tokenizer import CharLevelTokenizer
from tests.support.checkpoints import settings_of, write_checkpoint, write_yaml
from tests.support.errors import assert_rejected


def test_a_checkpoint_cannot_choose_code_or_files(tmp_path):
    """Without configuration files, evaluate.py and generate.py use the checkpoint's
    configuration.
    """
    keys = {
        "eval-tasks": ["task.yaml"],
        "eval_include_path": [str(tmp_path)],
        "eval_results_prefix": str(tmp_path),
    }
    files = {"sample_input_file": "/etc/passwd", "sample-output-file": str(tmp_path / "out")}
    write_checkpoint(tmp_path, "none", "nowhere", **keys, **files, text_gen_type="input-file")
    config = checkpoint_config(tmp_path / "global_step4")
    assert (config.evaluation.eval_tasks, config.evaluation.eval_include_path) == (None, None)
    assert config.evaluation.eval_results_prefix is None
    assert (config.generation.sample_input_file, config.generation.sample_output_file) == (
        None,
        None,
    )
    assert config.generation.text_gen_type == "input-file"
    chosen = checkpoint_config(tmp_path / "global_step4", {"sample_output_file": "mine"})
    assert chosen.generation.sample_output_file == "mine"


def test_keys_that_concern_only_training_are_ignored(tmp_path):
    write_checkpoint(tmp_path, "none", "nowhere")
    path = tmp_path / "global_step4" / "configs" / "config.yml"
    keys = {
        "distributed-backend": "mpi",
        "deepspeed_extra_args": {"aio": {}},
        "torch_compile": True,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    assert checkpoint_config(tmp_path / "global_step4").parallel.distributed_backend is None


def test_parts_of_a_mapping_in_several_files_and_in_overrides(tmp_path):
    """GPT-NeoX saves all files of a run."""
    write_checkpoint(tmp_path, "rotary", "nowhere", pos_emb_options={"fraction": 0.5})
    step = tmp_path / "global_step4"
    (step / "configs" / "more.yml").write_text('{"pos-emb-options": {"base": 700}}')
    options = {"pos_emb_options": {"scaling": "linear", "factor": 2}}
    expected = {"fraction": 0.5, "base": 700, **options["pos_emb_options"]}
    assert checkpoint_config(step, options).model.pos_emb_options == expected


@pytest.fixture
def two_files(tmp_path):
    """A function that writes a checkpoint with two configuration files; returns its folder."""

    def write(first, second):
        write_checkpoint(tmp_path, "kerple_log", "nowhere", **first)
        step = tmp_path / "global_step4"
        write_yaml(step / "configs" / "zz.yml", second)
        return step

    return write


@pytest.mark.parametrize(
    ("first", "second", "values"),
    [
        ({}, {"pos-emb": "alibi"}, "'kerple_log' alibi"),
        ({}, {"seq_length": 64}, "32 64"),
        ({"norm": "rmsnorm"}, {"norm": "layernorm"}, "rmsnorm layernorm"),
        ({"bias_gelu_fusion": True}, {"bias-gelu-fusion": False}, "True False"),
        ({"num_kv_heads": 2}, {"num-kv-heads": None}, "2 None"),
        (
            {"pos_emb_options": {"parameters": "shared"}},
            {"pos-emb-options": {"parameters": "per-layer"}},
            "parameters shared per-layer",
        ),
    ],
)
def test_configuration_files_of_different_models(first, second, values, two_files):
    """Which of them saved the weights is unknown."""
    step = two_files(first, second)
    (key,) = second
    with pytest.raises(UserError, match=rf'global_step4: .*"{key}.*Keep only the files') as caught:
        checkpoint_config(step)
    for text in (*values.split(), "config.yml:1", "zz.yml:1"):
        assert text in str(caught.value)

    # Not an error that is ignored, as a missing configuration is.
    assert not isinstance(caught.value, CheckpointError)
    (step / "configs" / "zz.yml").unlink()
    checkpoint_config(step)


def test_configuration_files_that_agree_about_the_model(two_files):
    """Files for several machines may repeat keys."""
    betas = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.9, 0.95]}}
    same = {"num-layers": 2.0, "pos_emb": "kerple_log", "optimizer": betas}
    places = {"data-path": "here", "save": "here", "log-interval": 3, "num-workers": 1}
    step = two_files({"log_interval": 5, "save": "there"}, {**same, **places, "init_method_std": 1})
    assert checkpoint_config(step).model.num_layers == 2
    assert files_notice(step) is None


@pytest.mark.parametrize(
    ("first", "second", "key", "values"),
    [
        ({}, {"optimizer": {"params": {"lr": 0.5}}}, "optimizer.params.lr", "0.001 0.5"),
        ({}, {"tokenizer-type": "HFTokenizer"}, "tokenizer-type", "CharLevelTokenizer HFTokenizer"),
        ({"eod_mask_loss": True}, {"eod-mask-loss": False}, "eod-mask-loss", "True False"),
        ({"hidden_dropout": 0.1}, {"hidden_dropout": 0.2}, "hidden_dropout", "0.1 0.2"),
        ({}, {"seed": 5}, "seed", "77 5"),
    ],
)
def test_configuration_files_of_different_trainings(first, second, key, values, two_files):
    step = two_files(first, second)
    assert checkpoint_config(step).model.pos_emb == "kerple_log"
    notice = files_notice(step)
    assert notice.startswith(f"notice: {step}: ")
    for text in (f'"{key}"', *values.split(), "config.yml:1", "zz.yml:1"):
        assert text in notice


def test_hidden_files_are_no_part_of_a_checkpoint(tmp_path):
    """macOS writes ._NAME next to NAME."""
    write_checkpoint(tmp_path, "none", "nowhere")
    step = tmp_path / "global_step4"
    (step / "configs" / "._config.yml").write_bytes(b"\0\5\26\7")
    (step / "._layer_00-model_00-model_states.pt").write_bytes(b"\0\5\26\7")
    write_manifest_of_folder(step, 4)
    assert not any("._" in name for name in read_manifest(step))
    assert find_damage(step) is None
    assert checkpoint_config(step).model.pos_emb == "none"


def test_position_options_that_evaluation_may_change():
    """They must not change when training resumes. An explicit default is not a change."""

    def configuration(pos_emb, **options):
        return Config.from_flat(settings_of(pos_emb, "nowhere", pos_emb_options=options))

    scaling = {"scaling": "linear", "factor": 4}
    plain, linear = configuration("rotary"), configuration("rotary", **scaling)
    (difference,) = model_differences(plain, linear)
    assert "the options of pos_emb" in difference
    assert model_differences(plain, linear, evaluation=True) == []
    # The default of trained_length is the length of the run.
    yarn, longer = (
        {"scaling": "yarn", "factor": 4},
        settings_of("rotary", "nowhere", max_position_embeddings=128),
    )
    assert "trained_length" in str(
        model_differences(
            configuration("rotary", **yarn), Config.from_flat({**longer, "pos_emb_options": yarn})
        )
    )
    assert model_differences(linear, Config.from_flat({**longer, "pos_emb_options": scaling})) == []
    assert (
        model_differences(
            configuration("kerple_log"), configuration("kerple_log", parameters="shared")
        )
        == []
    )
    assert model_differences(
        configuration("kerple_log"),
        configuration("kerple_log", parameters="per-layer"),
        evaluation=True,
    )


def test_shapes_of_blocks_that_change_the_output():
    """Some of them do not change the size of any tensor."""
    saved = Config.from_flat(settings_of("none", "nowhere"))
    for keys, name in (
        ({"sliding_window_width": 7}, "sliding_window_width"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"head_size": 16}, "head_size"),
        ({"activation": "silu"}, "activation"),
    ):
        (difference,) = model_differences(saved, saved.updated(**keys))
        assert difference.startswith(name)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"sliding_window_width": 15}, ["sliding_window_width None|15"]),
        (
            {"sliding_window_width": 7},
            {"sliding_window_width": [9, None]},
            ["sliding_window_width 7|[9, None]"],
        ),
        ({"sliding_window_width": 7}, {"sliding_window_width": [7, 7]}, []),
        ({}, {"bias_gelu_fusion": True}, ["bias_gelu_fusion False|True"]),
        ({"activation": "relu"}, {}, ["activation relu|gelu"]),
        ({}, {"layernorm_epsilon": 1e-6}, ["layernorm_epsilon 1e-05|1e-06"]),
        ({}, {"rms_norm_epsilon": 1e-6}, []),
        ({"norm": "rmsnorm"}, {}, ["norm rmsnorm|layernorm"]),
    ],
)
def test_differences_name_keys_and_their_values(before, after, expected):
    """Not values that the model derives from them, such as a window of one key more."""
    saved, config = (
        Config.from_flat(settings_of("none", "nowhere", **keys)) for keys in (before, after)
    )
    phrases = [f"{phrase.replace('|', ' in the checkpoint, ')} here" for phrase in expected]
    assert model_differences(saved, config) == phrases


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("rotary", {}), ("rotary", {}), False),
        (("rotary", {}), ("rotary", {"scaling": "linear", "factor": 4}), False),
        (("rotary", {}), ("kerple_log", {}), True),
        (("kerple_log", {}), ("kerple_log", {"parameters": "per-layer"}), True),
        (("rpe", {}), ("rpe", {"max_distance": 64}), False),
        (("rpe", {}), ("rpe", {"num_buckets": 8}), True),
    ],
)
def test_another_positional_method_or_other_parameters(before, after, expected):
    saved, config = (
        Config.from_flat(settings_of(pos_emb, "nowhere", pos_emb_options=options))
        for pos_emb, options in (before, after)
    )
    assert replaces_positional_method(saved, config) == expected


def test_the_trained_tokenizer():
    check = partial(check_trained_tokenizer, tokenizer=CharLevelTokenizer(), place="run")
    for trained in (None, CharLevelTokenizer().fingerprint):
        check(trained, allowed=False)
    check("0" * 64, allowed=True)
    assert_rejected("^run: .*000000000000.*CharLevelTokenizer", check, "0" * 64, allowed=False)


def test_the_trained_data(tmp_path):
    """A dataset is known by its contents; other contents under the same path are an error."""
    first, moved, new = (str(tmp_path / name) for name in ("a", "b", "c"))
    assert check_trained_data(tmp_path, {first: "1"}) == []
    torch.save({"training": {"data": {first: "1"}}}, tmp_path / STATE_FILE)
    assert check_trained_data(tmp_path, {first: "1", moved: "1", new: "2"}) == [new]
    for prefix in (first, str(tmp_path / "x" / ".." / "a")):
        assert_rejected(re.escape(prefix), check_trained_data, tmp_path, {prefix: "2"})


# Keys of the model that need no row in OUTPUT_SETTINGS, because they change
UNCOMPARED_KEYS = {
    # the sizes of tensors, which are compared when weights are loaded,
    *("num_layers", "hidden_size", "intermediate_size", "mlp_multiple_of", "padded_vocab_size"),
    *("make_vocab_size_divisible_by", "attention_type", "use_qk_layernorm", "use_bias_in_norms"),
    *("use_bias_in_attn_linear", "use_bias_in_attn_output", "use_bias_in_mlp"),
    # the positional method, whose name and options are compared,
    *("pos_emb", "pos_emb_options", "pos_emb_module", "rotary_pct", "rotary_emb_base"),
    *("mlp_width", "dapev2_kernel", "noise_seq_length", "rpe_num_buckets", "rpe_max_distance"),
    # and only training, the length or how the same numbers are computed.
    *("hidden_dropout", "attention_dropout", "init_method", "init_method_std"),
    *("output_layer_init_method", "seq_length", "max_position_embeddings"),
    *("attention_backend", "output_layer_parallelism", "release_bf16_distances"),
}


def test_every_key_that_changes_logits_is_compared():
    """A new key belongs into OUTPUT_SETTINGS, or above with its reason."""
    compared = set()
    for keys in OUTPUT_SETTINGS.values():
        compared.update(keys)
    assert not compared & UNCOMPARED_KEYS
    assert set(ModelConfig.model_fields) == compared | UNCOMPARED_KEYS
