"""The files in GPT-NeoX's configs/ (HEAD of May 2026): which ones load, and why the others are rejected.

Each row holds the keys and values of one file that matter here; keys that nearly all files share are in SHARED.
"""

import re

import pytest
import torch

from megatron.config import Config, UserError
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings

SHARED = {
    "pipe_parallel_size": 1,
    "model_parallel_size": 1,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "norm": "layernorm",
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "scaled_upper_triang_masked_softmax_fusion": True,
    "bias_gelu_fusion": False,
    "gpt_j_residual": False,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "zero_optimization": {
        "stage": 1,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "contiguous_gradients": True,
    },
    "train_micro_batch_size_per_gpu": 4,
    "data_impl": "mmap",
    "checkpoint_activations": True,
    "checkpoint_num_layers": 1,
    "partition_activations": True,
    "synchronize_each_layer": True,
    "gradient_clipping": 1.0,
    "weight_decay": 0.1,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "fp16": {
        "fp16": True,
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "train_iters": 320_000,
    "lr_decay_iters": 320_000,
    "distributed_backend": "nccl",
    "lr_decay_style": "cosine",
    "warmup": 0.01,
    "checkpoint_factor": 10_000,
    "eval_interval": 1000,
    "eval_iters": 10,
    "log_interval": 100,
    "steps_per_print": 10,
    "keep_last_n_checkpoints": 4,
    "wall_clock_breakdown": True,
}


def sizes(layers: int, hidden: int, heads: int, **keys: object) -> dict[str, object]:
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **keys}


SMALL = sizes(12, 768, 12)
NO_FUSION = {"scaled_upper_triang_masked_softmax_fusion": False, "rope_fusion": False, "layernorm_fusion": False}
SLURM = {"launcher": "slurm", "deepspeed_slurm": True, "comment": "neox"}
GPT2_FILES = {"vocab_file": "data/gpt2-vocab.json", "merge_file": "data/gpt2-merges.txt"}
LOCAL = {
    **GPT2_FILES,
    "data_path": "data/enwik8/enwik8_text_document",
    "save": "checkpoints",
    "load": "checkpoints",
    "checkpoint_validation_with_forward_pass": False,
    "tensorboard_dir": "tensorboard",
    "log_dir": "logs",
}


def pythia(layers: int, hidden: int, heads: int, **keys: object) -> dict[str, object]:
    return sizes(
        layers,
        hidden,
        heads,
        **{
            "rotary_pct": 0.25,
            "gpt_j_residual": True,
            "attention_config": [[["flash"], layers]],
            "bias_gelu_fusion": True,
            "fp16": {**SHARED["fp16"], "initial_scale_power": 12},
            "train_iters": 143_000,
            "lr_decay_iters": 143_000,
            "checkpoint_factor": 1000,
            "extra_save_iters": [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
            "eval_interval": 143_000,
            "tokenizer_type": "HFTokenizer",
            **keys,
        },
    )


LLAMA = {
    "make_vocab_size_divisible_by": 1,
    "rotary_pct": 1,
    "norm": "rmsnorm",
    "rms_norm_epsilon": 1e-5,
    "use_bias_in_norms": False,
    "use_bias_in_attn_linear": False,
    "activation": "swiglu",
    "mlp_multiple_of": 256,
}
LLAMA_1 = {**LLAMA, "rms_norm_epsilon": 1e-6, "use_bias_in_mlp": False}
CODE_LLAMA = {**LLAMA, "rotary_emb_base": 1_000_000}
LLEMMA = {
    **LLAMA,
    "pipe_parallel_size": 0,
    "precision": "bfloat16",
    "fp16": None,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "tokenizer_type": "SPMTokenizer",
    "finetune": True,
    "load": "checkpoints",
}
# File -> (keys, features of the MLP). GPT-NeoX divides intermediate_size by 3 for a gated MLP; the files
# marked "smaller" have not been adapted to this, so that their models are smaller than those they are named after.
LLAMA_FILES: dict[str, tuple[dict[str, object], int]] = {
    "llama/7B": (sizes(32, 4096, 32, **LLAMA_1, intermediate_size=32768), 11008),
    "llama/13B": (sizes(40, 5120, 40, **LLAMA_1, intermediate_size=40960), 13824),
    "llama/30B": (sizes(60, 6656, 52, **LLAMA_1, intermediate_size=53248), 17920),
    "llama/65B": (sizes(80, 8192, 64, **LLAMA_1, intermediate_size=65536), 22016),
    "llama2/7B": (sizes(32, 4096, 32, **LLAMA, intermediate_size=32768), 11008),
    "llama2/13B": (sizes(40, 5120, 40, **LLAMA, intermediate_size=41472, model_parallel_size=2), 13824),
    "llama2/70B": (sizes(80, 8192, 64, **CODE_LLAMA, intermediate_size=86016, num_kv_heads=8), 28672),
    "llama2/codellama_7B": (sizes(32, 4096, 32, **CODE_LLAMA), 5632),  # smaller
    "llama2/codellama_34B": (sizes(48, 8192, 64, **CODE_LLAMA, num_kv_heads=8), 11008),  # smaller
    # GPT-NeoX itself rejects attention_type, decay_lr_to and warmup_iters.
    "llemma/7B": (sizes(32, 4096, 32, **LLEMMA, model_parallel_size=2, decay_lr_to=0.033, warmup_iters=500), 5632),
    "llemma/34B": (
        sizes(48, 8192, 64, **LLEMMA, model_parallel_size=8, attention_type="groupedquery", num_kv_heads=8),
        11008,
    ),
    "mistral/7B": (
        {
            **sizes(32, 4096, 32, **LLAMA, intermediate_size=14336, num_kv_heads=8),
            **{
                "mlp_multiple_of": 1,
                "sliding_window_width": 4096,
                "seq_length": 8192,
                "max_position_embeddings": 131_072,
            },
        },
        4779,  # smaller
    ),
}

# Complete files, and files that are combined with a model's.
LOADED = {
    "19M": sizes(6, 512, 8, **NO_FUSION, deepspeed_extra_args={"comms_logger": {"enabled": True, "debug": False}}),
    "49M": sizes(10, 640, 10, **NO_FUSION, rotary_pct=0.25, gpt_j_residual=True),
    "125M": {**SMALL, **NO_FUSION, "hostfile": "/mock_path"},
    "125M-json": {**SMALL, **NO_FUSION, "hostfile": "/mock_path"},
    "bf16_125M": {**SMALL, **NO_FUSION, "fp16": None, "precision": "bfloat16", "fp32_allreduce": True},
    "bnb_125M": {**SMALL, **NO_FUSION, "use_bnb_optimizer": True, "zero_optimization": {"stage": 0}},
    "slurm_125M": {**SMALL, **SLURM, "bias_gelu_fusion": True},
    "350M": sizes(24, 1024, 16, **NO_FUSION),
    "760M": sizes(24, 1536, 16, **NO_FUSION),
    "800M": sizes(16, 2048, 8, **NO_FUSION),
    "1-3B": sizes(24, 2048, 16, **NO_FUSION),
    "2-7B": sizes(32, 2560, 32, **NO_FUSION),
    "6-7B": sizes(32, 4096, 32, **NO_FUSION),
    "13B": sizes(40, 5120, 40, **NO_FUSION),
    "20B": sizes(44, 6144, 64, pipe_parallel_size=4, model_parallel_size=2, rotary_pct=0.25, gpt_j_residual=True),
    "175B": sizes(96, 12288, 96, **NO_FUSION),
    "pythia/14M": pythia(6, 128, 4, pipe_parallel_size=0, checkpoint_activations=False, partition_activations=False),
    "pythia/31M": pythia(6, 256, 8, pipe_parallel_size=0, checkpoint_activations=False, partition_activations=False),
    "pythia/70M": pythia(6, 512, 8),
    "pythia/160M": pythia(12, 768, 12),
    "pythia/410M": pythia(24, 1024, 16),
    "pythia/1B": pythia(
        16, 2048, 8, attention_config=None, fp16={"enabled": True, "type": "bfloat16", "auto_cast": True}
    ),
    "pythia/1-4B": pythia(24, 2048, 16),
    "pythia/2-8B": pythia(32, 2560, 32, log_grad_norm=True),
    "pythia/6-9B": pythia(32, 4096, 32, model_parallel_size=2),
    "pythia/12B": pythia(36, 5120, 40, model_parallel_size=4, log_grad_norm=True),
    "finetuning_configs/6-9B": pythia(
        32, 4096, 32, load="/path/to/checkpoint", finetune=True, zero_optimization={"load_from_fp32_weights": False}
    ),
    "cpu_mock_config": {**SMALL, "global_num_gpus": 1},
    "docker/pythia-paths": {
        **pythia(6, 512, 8),
        **{f"{name}_data_paths": ["a"] for name in ("train", "valid", "test")},
    },
    "eleutherai_cluster": {**SMALL, "wandb_team": "eleutherai", "wandb_project": "neox", "wandb_group": "example"},
    "llama/train_config": {**SMALL, **LOCAL, "finetune": True, "min_lr": 2e-5, "override_lr_scheduler": True},
    "local_setup": {**SMALL, **LOCAL},
    "local_setup_comet": {
        **SMALL,
        **LOCAL,
        "use_comet": True,
        "comet_project": "test_project",
        "comet_experiment_name": "test_experiment",
        "comet_tags": ["test_tag1", "test_tag2"],
        "comet_others": {"test_others": None},
    },
    "local_setup_wandb": {**SMALL, **LOCAL, "use_wandb": True, "wandb_host": "https://api.wandb.ai"},
    "prof": {
        **SMALL,
        "profile": True,
        "profile_step_start": 10,
        "profile_step_stop": 12,
        "memory_profiling": True,
        "memory_profiling_path": "tensorboard",
        "tensorboard_dir": "tensorboard",
    },
    "slurm_local": {**SMALL, **SLURM, **LOCAL, "load": None},
    "slurm_local.json": {**SMALL, **SLURM, **GPT2_FILES, "save": "checkpoints"},
    "text_generation": {
        **SMALL,
        **{"text_gen_type": "unconditional", "maximum_tokens": 102, "prompt_end": "\n", "temperature": 1.0},
        **{"top_p": 0.0, "top_k": 0, "recompute": False, "num_samples": 10},
        **{"sample_input_file": "sample_input.txt", "sample_output_file": "sample_output.txt"},
    },
}


def mamba(layers: int, hidden: int) -> dict[str, object]:
    return sizes(layers, hidden, 12, pipe_parallel_size=0, attention_config=[[["mamba"], layers]], activation="silu")


AUTOTUNING = {"enabled": True, "arg_mappings": {"train_micro_batch_size_per_gpu": "--train_micro_batch_size_per_gpu"}}

# File -> (keys, the keys that are reported).
REJECTED: dict[str, tuple[dict[str, object], list[str]]] = {
    "125M-dmoe": ({**SMALL, "moe_num_experts": 8}, ["moe_num_experts"]),
    "1-3B-transformer-engine": (
        sizes(24, 2048, 16, te_columnparallel=False, te_layernorm_mlp=True, te_mha=True, te_fp8_format="hybrid"),
        ["te_layernorm_mlp", "te_mha"],
    ),
    "gmlp_small": (
        {**SMALL, "attention_config": [[["gmlp"], "all"]], "gmlp_attn_dim": 64, "pos_emb": "none"},
        ["attention_config"],
    ),
    "sparse": (
        {**SMALL, "attention_config": [[["local", "global"], "all"]], "sparsity_config": {"block": 16}},
        ["attention_config", "sparsity_config"],
    ),
    "rwkv/170M": (
        {
            **SMALL,
            "attention_config": [[["rwkv"], 12]],
            "fp16": None,
            "bf16": {"bf16": True, "enabled": True, "loss_scale": 0, "hysteresis": 2},
        },
        ["attention_config"],
    ),
    "mamba/mamba-130M": (mamba(24, 768), ["attention_config"]),
    "mamba/mamba-370M": (mamba(48, 1024), ["attention_config", "hidden_size"]),
    "mamba/mamba-790M": (mamba(48, 1536), ["attention_config"]),
    "mamba/mamba-1.4B": (mamba(48, 2048), ["attention_config", "hidden_size"]),
    "mamba/mamba-2.8B": (mamba(64, 2560), ["attention_config", "hidden_size"]),
    "autotuning_configs/tune": ({**SMALL, **SLURM, "autotuning_config": AUTOTUNING}, ["autotuning_config"]),
    "autotuning_configs/tune_1-3B": (sizes(24, 2048, 16, **SLURM, autotuning=AUTOTUNING), ["autotuning"]),
    "autotuning_configs/small_tune": (
        {**SMALL, **SLURM, "autotuning": AUTOTUNING, "zero_optimization": {"stage": [0, 1, 2, 3]}},
        ["autotuning", "zero_optimization.stage"],
    ),
    "autotuning_configs/tune_6-7B": (
        sizes(32, 4096, 32, autotuning={**AUTOTUNING, "mp_size": 8}, zero_optimization={"stage": [0, 1, 2, 3]}),
        ["autotuning", "zero_optimization.stage"],
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_loaded(name):
    config = Config.from_flat({**SHARED, **LOADED[name]}, source=name)
    assert all(" is ignored: " in notice for notice in config.notices)
    assert config.checkpoint.saves(0) == name.startswith(("pythia", "docker", "finetuning"))


def llama_config(name: str) -> Config:
    keys, _ = LLAMA_FILES[name]
    shared = {key: value for key, value in SHARED.items() if key != "warmup" or "warmup_iters" not in keys}
    return Config.from_flat({**shared, **keys}, source=name)


@pytest.mark.parametrize("name", LLAMA_FILES)
def test_llama_s_files(name):
    keys, features = LLAMA_FILES[name]
    config = llama_config(name)
    model = config.model
    assert model.mlp_features == features
    assert model.num_kv_heads == keys.get("num_kv_heads", model.num_attention_heads)
    assert model.window == (4097 if name == "mistral/7B" else None)
    assert (model.use_bias_in_norms, model.use_bias_in_attn_linear) == (False, False)
    notices = [notice for notice in config.notices if " is ignored: " not in notice]
    smaller = features < 2 * model.hidden_size
    assert smaller == name.startswith(("llama2/codellama", "llemma", "mistral"))
    assert [f"the gated MLP has {features:,} features, a third of" in notice for notice in notices] == [True] * smaller


def test_llama_s_sizes():
    """Parameters of Llama 7B, and of Llama 2 70B plus the biases of the MLP, which llama2's files do not turn off."""
    biases = 80 * (2 * 28672 + 8192)
    for name, expected in (("llama/7B", 6_738_415_616), ("llama2/70B", 68_976_648_192 + biases)):
        settings = ModelSettings(llama_config(name).model, padded_vocab_size=32_000)
        with torch.device("meta"):
            assert sum(parameter.numel() for parameter in GPT(settings).parameters()) == expected


def test_llemma_s_schedule():
    schedule = llama_config("llemma/7B").schedule
    assert (schedule.lowest_lr(1e-4), schedule.warmup_steps(320_000)) == (pytest.approx(3.3e-6), 500)


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    keys, expected = REJECTED[name]
    with pytest.raises(UserError) as caught:
        Config.from_flat({**SHARED, **keys}, source=name)
    lines = str(caught.value).splitlines()[1 if len(expected) > 1 else 0 :]
    found = [re.match(rf'\s*({re.escape(name)}: )?"?([\w.]+)', line)[2] for line in lines]
    assert sorted(found) == sorted(expected)


def test_every_file_is_in_one_table():
    assert (len(LOADED), len(LLAMA_FILES), len(REJECTED)) == (38, 12, 14)
    assert len(LOADED | LLAMA_FILES | REJECTED) == 64
