"""Keys that contradict each other are rejected before anything is started."""

from pathlib import Path

import pytest

from megatron.config import Config, UserError
from megatron.config.checks import (
    ATTENTION_CONFIG,
    ELSEWHERE,
    IGNORED,
    KNOWN_KEYS,
    UNSUPPORTED,
    unsupported_reason,
)
from megatron.config.schema import ALIASES, FIELDS, MAPPINGS, SECTIONS
from tests.support.errors import assert_rejected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden-size": 33}, "hidden_size 33.*num_attention_heads 4"),
        ({"model-parallel-size": 8}, "num_attention_heads 4.*model_parallel_size 8"),
        ({"num-kv-heads": 3}, "num_attention_heads 4.*num_kv_heads 3"),
        ({"num-kv-heads": 1, "model-parallel-size": 2}, "num_kv_heads 1.*model_parallel_size 2"),
        ({"activation": "swiglu", "intermediate-size": 1}, "MLP.*0"),
        ({"attention-type": "groupedquery"}, "attention_type groupedquery.*num_kv_heads 4"),
        (
            {"intermediate-size": 129, "model-parallel-size": 2},
            "MLP.*129.*model_parallel_size 2.*mlp_multiple_of",
        ),
        ({"min_lr": 1e-5, "decay_lr_to": 0.1}, '"min_lr".*"decay_lr_to"'),
        ({"warmup": 0.1, "warmup_iters": 10}, '"warmup".*"warmup_iters"'),
        ({"pipe-parallel-size": 3}, "pipe_parallel_size 3.*num_layers 2"),
        (
            {"model-parallel-size": 2, "padded_vocab_size": 129},
            "padded_vocab_size 129.*model_parallel_size 2",
        ),
        ({"pos-emb": "kerple_logg"}, 'pos_emb "kerple_logg".*kerple_log'),
        ({"pos-emb": "rotary", "pos-emb-options": {"fraction": 2.0}}, "pos_emb rotary.*fraction"),
        ({"pos-emb": "rpe", "pos-emb-options": {"max_distance": "200"}}, "pos_emb rpe"),
        (
            {"pos-emb": "kerple_power__ap", "attention-backend": "sdpa"},
            "kerple_power__ap: attention-backend 'sdpa'",
        ),
        (
            {"attention-dropout": 0.1, "model-parallel-size": 2},
            r"attention_dropout 0\.1.*model_parallel_size 2",
        ),
        (
            {"pos-emb": "per_layer", "pos-emb-options": {"methods": ["rotary", "alibi"] * 20}},
            "per_layer: methods.*40.*num_layers",
        ),
        ({"pos-emb": "per_layer", "rotary_pct": 0.5}, "rotary_pct.*pos_emb per_layer"),
        (
            {"pos-emb": "rotary", "rotary_pct": 1, "pos_emb_options": {"fraction": 0.5}},
            r"rotary_pct.*pos_emb_options\.fraction",
        ),
        (
            {"pos-emb": "dape_fire", "noise_seq_length": 8, "pos_emb_options": {"threshold": 8}},
            r"noise_seq_length.*pos_emb_options\.threshold",
        ),
        ({"pos-emb": "per_layer", "pos-emb-options": {"methods": ["rotray"]}}, "pos_emb per_layer"),
        ({"pos-emb": "dape", "model-parallel-size": 2}, "pos_emb dape"),
        ({"pos-emb-module": "no/such/file.py"}, r"pos_emb_module no/such/file\.py.*such file"),
        (
            {"pos-emb": "learned", "max-position-embeddings": 8},
            "seq_length 16.*max_position_embeddings 8.*learned",
        ),
        (
            {"pos-emb": "learned", "pos-emb-options": {"random_range": 17}},
            "random_range 17.*max_position_embeddings 16",
        ),
        (
            {
                "pos-emb": "rotary",
                "pos-emb-options": {"random_range": 64},
                "reset-attention-mask": True,
            },
            "reset_attention_mask.*random_range.*rotary",
        ),
        (
            {
                "pos-emb": "per_layer",
                "pos-emb-options": {"methods": ["none", {"rotary": {"random_range": 64}}]},
                "reset-attention-mask": True,
            },
            "reset_attention_mask.*random_range.*per_layer",
        ),
        (
            {"pos-emb-options": {"random_range": 24}, "seq-length-val": 32},
            "seq_length_val 32.*random_range 24",
        ),
        (
            {"zero_optimization": {"stage": 2}, "pipe-parallel-size": 1},
            r"zero_optimization\.stage 2.*pipe_parallel_size 1: DeepSpeed's.*stage",
        ),
        (
            {"zero_optimization": {"stage": 3}, "model-parallel-size": 2},
            r"stage 3.*model_parallel_size 2",
        ),
        *(
            (
                {"zero_optimization": {"stage": stage, key: value}},
                rf"zero_optimization.{key} has no effect with stage {stage}: .*; remove .*stage 3",
            )
            for stage, key, value in (
                (2, "offload_param", {"device": "cpu"}),
                (1, "zero_quantized_weights", True),
                (0, "zero_hpz_partition_size", 4),
            )
        ),
        *(
            (
                {"zero_optimization": {"stage": 2, "compute_grad_norm": value}},
                r"compute_grad_norm false.*gradient_clipping 0",
            )
            for value in (False, 0, "False")
        ),
        (
            {"zero_optimization": {"stage": 3, "compute_grad_norm": 0}, "gradient_clipping": 0},
            "compute_grad_norm false.*stage 3",
        ),
        (
            {"use_bnb_optimizer": True, "optimizer": {"type": "Lion"}},
            r'"use_bnb_optimizer".*optimizer\.type.*lion',
        ),
        (
            {"use_bnb_optimizer": True, "optimizer": {"params": {"adam_w_mode": False}}},
            r'"optimizer\.params\.adam_w_mode": use_bnb_optimizer.*adam8bit',
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
            r"params\.betas.*sgd.*weight_decay",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
            r'"optimizer\.params\.nesterov".*optimizer\.params\.momentum.*0',
        ),
        ({"min_lr": 1.0}, r"min_lr 1\.0.*optimizer\.params\.lr 0\.001"),
        ({"extrapolation-tokens": 64}, "extrapolation_tokens.*extrapolation_lengths"),
        (
            {"extrapolation-lengths": [16, 32], "pipe-parallel-size": 2},
            "extrapolation_lengths.*pipe_parallel_size 2",
        ),
        (
            {"extrapolation-lengths": [16, 48], "extrapolation-tokens": 40},
            "16, 48.*extrapolation_tokens, 40",
        ),
        ({"data-path": "a", "train-data-paths": ["b"]}, "data_path.*train_data_paths"),
        (
            {"train-data-paths": ["a", "b"], "train-data-weights": [1.0]},
            "train_data_weights.*1.*2 train_data_paths",
        ),
        ({"test-data-paths": ["a"], "test-data-weights": [0]}, r'test-data-weights\.0".*0'),
        ({"split": "949 50 1"}, "split '949 50.*TRAIN,VALID,TEST"),
        (
            {"weight-by-num-documents": True, "data-path": "a"},
            "weight_by_num_documents.*train_data_paths",
        ),
        (
            {
                "weight-by-num-documents": True,
                "train-data-paths": ["a"],
                "train-data-weights": [1.0],
            },
            "weight_by_num_documents.*train_data_weights",
        ),
        (
            {"deepspeed_extra_args": {"train_batch_size": 4}},
            r"deepspeed_extra_args\.train_batch_size",
        ),
        ({"deepspeed_extra_args": {"bf16": {"enabled": True}}}, r"deepspeed_extra_args\.bf16"),
        (
            {"deepspeed_extra_args": {"coms_logger": {}}},
            r"deepspeed_extra_args\.coms_logger.*comms_logger",
        ),
        ({"finetune": True}, "finetune"),
        ({"iteration": 0}, "iteration.*load"),
        ({"num_nodes": 0}, "num_nodes.*-1"),
        ({"include": "localhost:0", "exclude": "localhost:1"}, "include.*exclude"),
        ({"include": "localhost:0", "num_gpus": 1}, "include.*GPUs.*num_gpus"),
    ],
)
def test_contradictions(flat, keys, message):
    assert_rejected(message, Config.from_flat, {**flat, **keys})


def test_consistent_combinations_are_accepted(flat):
    off = {
        "offload_param": {"device": "none"},
        "zero_quantized_weights": False,
        "zero_hpz_partition_size": 1,
    }
    for keys in (
        {"zero_optimization": {"stage": 1}, "pipe-parallel-size": 2},
        {"zero_optimization": {"stage": 1, **off}},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}, "gradient_clipping": 0},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"pos-emb": "alibi", "max-position-embeddings": 8},
        {"extrapolation-lengths": [131_072], "pipe-parallel-size": 1},
        {"finetune": True, "load": "somewhere", "iteration": 0},
    ):
        config = Config.from_flat({**flat, **keys})
        assert (
            config.to_flat().items()
            >= {name.replace("-", "_"): value for name, value in keys.items()}.items()
        )
        assert not config.notices


def test_a_decay_that_ends_after_training_is_a_notice(flat):
    keys = {**flat, "train_iters": 60}
    (notice,) = Config.from_flat({**keys, "lr_decay_iters": 600}).notices
    assert notice.startswith("lr_decay_iters 600 is above train_iters 60")
    assert not Config.from_flat({**keys, "lr_decay_iters": 60}).notices


def test_steps_without_a_learning_rate_are_a_notice(flat):
    keys = {**flat, "train_iters": 90, "lr_decay_iters": 70}
    for style in ("linear", "cosine"):
        newer = {"lr_schedule": "neox-2022"}
        for more in ({}, {"decay_lr_to": 0}, {**newer, "warmup": 0}, newer):
            (notice,) = Config.from_flat({**keys, "lr_decay_style": style, **more}).notices
            assert "lr_decay_iters 70" in notice
            assert "train_iters 90" in notice
        for more in (
            {"min_lr": 1e-6},
            {"decay_lr_to": 0.1},
            {"lr_decay_iters": 90},
        ):
            assert not Config.from_flat({**keys, "lr_decay_style": style, **more}).notices
    assert not Config.from_flat({**keys, "lr_decay_style": "exponential"}).notices


def test_keys_without_effect_are_a_notice(flat):
    def notices(method: str, **keys) -> tuple[str, ...]:
        return Config.from_flat({**flat, "pos-emb": method, **keys}).notices

    assert notices("alibi", rotary_pct=0.25) == (
        "rotary_pct 0.25 has no effect with pos_emb alibi",
    )
    assert notices("p_rope", rotary_pct=0.25) == (
        "rotary_pct 0.25 has no effect with pos_emb p_rope",
    )
    assert notices("rotary", rotary_pct=0.25, rotary_emb_base=500) == ()
    assert notices("alibi", rotary_pct=1.0, rotary_emb_base=10000) == ()
    assert notices("per_layer", mlp_width=8) == (
        "mlp_width 8 has no effect with pos_emb per_layer",
    )
    assert notices("rotary", rpe_num_buckets=8) == (
        "rpe_num_buckets 8 has no effect with pos_emb rotary",
    )
    assert (
        notices("fire", mlp_width=8, noise_seq_length=64)
        == notices("rope_dapev2", dapev2_kernel=5)
        == ()
    )
    config = Config.from_flat({**flat, "pos-emb": "xpos", "rotary_emb_base": 500})
    assert (config.notices, config.model.positional_options) == ((), {"base": 500})


@pytest.mark.parametrize(
    ("key", "value", "idle", "acting"),
    [
        ("layernorm_epsilon", 3e-6, {"norm": "rmsnorm"}, {"norm": "layernorm"}),
        ("rms_norm_epsilon", 3e-6, {}, {"norm": "rmsnorm"}),
        ("bias_gelu_fusion", True, {"activation": "relu"}, {}),
        (
            "init_method_std",
            0.03,
            {"init_method": "xavier_normal", "output_layer_init_method": "wang_init"},
            {"init_method": "small_init"},
        ),
        ("positional_lr_factor", 0.3, {"pos-emb": "sandwich"}, {"pos-emb": "kerple_power"}),
        ("min_lr", 1e-6, {"lr_decay_style": "constant"}, {"lr_decay_style": "exponential"}),
        ("decay_lr_to", 0.2, {"lr_decay_style": "constant"}, {}),
        ("fp16.type", "bf16", {"precision": "fp32"}, {"fp16.enabled": False}),
        ("fp16.hysteresis", 5, {"precision": "bfloat16"}, {"precision": "fp16"}),
        ("fp16.loss_scale", 8.0, {}, {"fp16.enabled": True}),
        (
            "fp16.loss_scale_window",
            50,
            {"fp16.enabled": True, "fp16.loss_scale": 64.0},
            {"fp16.enabled": False, "bf16.enabled": True},
        ),
        ("weighted_sampler_alpha", 0.3, {}, {"weight_by_num_documents": True}),
        ("split", "8,1,1", {"train_data_paths": ["a"]}, {"data_path": "a"}),
        (
            "merge_file",
            "m.txt",
            {"tokenizer_type": "SPMTokenizer"},
            {"tokenizer_type": "GPT2BPETokenizer"},
        ),
        ("vocab_file", "v", {"tokenizer_type": "CharLevelTokenizer"}, {}),
        ("pipe_partition_method", "uniform", {"pipe_parallel_size": 1}, {"pipe_parallel_size": 2}),
        ("checkpoint_num_layers", 2, {}, {"checkpoint_activations": True}),
        ("seq_length_val", 8, {"eval_iters": 0}, {"eval_iters": 3}),
        ("curriculum_learning.min_difficulty", 8, {}, {"curriculum_learning.enabled": False}),
        ("wandb_run_name", "long", {}, {"use_wandb": False}),
        ("profile_step_start", 4, {}, {"profile": False}),
        ("account", "project", {"launcher": "openmpi"}, {"launcher": "slurm"}),
    ],
)
def test_keys_that_need_another_key(flat, key, value, idle, acting):
    def notices(**keys) -> tuple[str, ...]:
        if "weight_by_num_documents" in keys:
            keys |= {"train_data_paths": ["a"], "valid_data_paths": ["b"]}
        return Config.from_flat(flat).updated(**keys).notices

    (notice,) = notices(**{key: value}, **idle)
    assert notice.startswith(key)
    assert not notices(**{key: value}, **acting)
    # Nothing is said of a default, also if it is set.
    section, name = FIELDS[tuple(key.split("."))]
    default = SECTIONS[section].model_fields[name].default
    assert not notices(**{key: default}, **idle)


SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}

KEYS = [
    key
    for line in (Path(__file__).parents[3] / "data" / "neox_keys.txt").read_text().splitlines()
    if not line.startswith("#")
    for key in line.split()
]


def test_every_key_is_in_exactly_one_table():
    supported = {path[0] for path in (*FIELDS, *MAPPINGS, *ALIASES)}
    for key in KEYS:
        tables = [key in supported, key in UNSUPPORTED or key == ATTENTION_CONFIG, key in IGNORED]
        assert sum(tables) == 1, key


def test_every_key_of_the_tables_is_of_gpt_neox():
    assert {key for key in KNOWN_KEYS if "." not in key} <= set(KEYS)


def test_unsupported_keys():
    for key, entry in UNSUPPORTED.items():
        assert unsupported_reason(key, "not the default", SIZES) == entry.reason, key
        for value in (None, *entry.off):
            assert unsupported_reason(key, value, SIZES) is None, (key, value)
    for key in IGNORED:
        assert unsupported_reason(key, "anything", SIZES) is None


OTHER = (
    "lora",
    "prefix-tuning",
    "early-stopping",
    "torch_compile",
    "enable-cuda-graph",
    "async_save",
    "epochs",
)
PATHS = ("save", "data-path", "train_data_paths", "hostfile", "vocab_file", "eval_include_path")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mlp-type": "llama"}, '"mlp-type" is a GPT-NeoX key'),
        ({"attention-config": [[["local"], 2]]}, '"attention-config" is a GPT-NeoX key'),
        ({"attention-config": [["global", 2]]}, '"attention-config" is a GPT-NeoX key'),
        (
            {"optimizer": {"params": {"freeze_step": 9}}},
            r'"optimizer\.params\.freeze_step" is a GPT-NeoX key',
        ),
        ({"flops_profiler": {"enabled": True}}, '"flops_profiler" is a GPT-NeoX key'),
        *(({key: {"rank": 8}}, f'"{key}" is not supported: ') for key in OTHER),
        *(({key: " \t"}, f'"{key}') for key in PATHS),
        *(({key: ""}, f'"{key}') for key in PATHS),
        ({"train_data_paths": [""]}, r'"train_data_paths\.0"'),
    ],
)
def test_keys_and_paths_without_a_meaning(flat, keys, message):
    """The errors name no similar keys, and not what pydantic checks paths with."""
    with pytest.raises(UserError, match=f"^a.yml: {message}") as caught:
        Config.from_flat({**flat, **keys}, source="a.yml")
    assert "nearest" not in str(caught.value)
    assert "pattern" not in str(caught.value)


def test_keys_of_other_projects_are_in_no_other_table():
    assert not set(ELSEWHERE) & {*KEYS, *KNOWN_KEYS, *(path[0] for path in (*FIELDS, *ALIASES))}


def test_a_configuration_has_a_notice_for_each_ignored_key(flat):
    keys = {
        "rope-fusion": True,
        "optimizer": {"params": {"max_grad_norm": 1.0}},
        "layernorm-fusion": False,
    }
    assert Config.from_flat({**flat, **keys}, source="a.yml").notices == (
        f'a.yml: "rope-fusion" is ignored: {IGNORED["rope_fusion"]}',
        'a.yml: "optimizer.params.max_grad_norm" is ignored: '
        f"{IGNORED['optimizer.params.max_grad_norm']}",
    )


def test_null_means_the_default(flat):
    """Both are null in GPT-NeoX."""
    config = Config.from_flat({**flat, "extra_save_iters": None, "deepspeed_extra_args": None})
    assert config.checkpoint.extra_save_iters == ()


def test_values_that_change_nothing_are_accepted():
    """Compared by type: False is not 0."""
    fp32 = {"grad_accum_dtype": "fp32"}
    for key, value, keys, accepted in (
        ("opt_pos_emb_offset", False, SIZES, False),
        ("flops_profiler", {"enabled": False, "profile_step": 1}, SIZES, True),
        ("flops_profiler", {"enabled": True}, SIZES, False),
        ("data_types", fp32, {"precision": "bfloat16", "zero_optimization": {"stage": 1}}, True),
        ("data_types", fp32, {"precision": "bfloat16", "zero_optimization": {"stage": 2}}, False),
        ("data_types", fp32, {"fp16": {"enabled": True}}, False),
        (ATTENTION_CONFIG, [[["global"], 1], [["flash"], 1]], SIZES, True),
        (ATTENTION_CONFIG, [[["global", "flash"], "all"]], SIZES, True),
        (ATTENTION_CONFIG, ["global", "flash"], SIZES, True),
        (ATTENTION_CONFIG, [[["local", "global"], "all"]], SIZES, False),
        (ATTENTION_CONFIG, [[["global"], 3]], SIZES, False),
        (ATTENTION_CONFIG, [[["global"]]], SIZES, False),
        (ATTENTION_CONFIG, 2, SIZES, False),
    ):
        assert (unsupported_reason(key, value, keys) is None) == accepted, (key, value)
