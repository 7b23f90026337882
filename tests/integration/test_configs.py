"""Every file under configs/ loads, and the models and hyperparameters are those of the paper."""

from pathlib import Path

import pytest

from kerple.positional import ModelShape, build
from megatron.config import load_config
from tests.support.errors import assert_rejected

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted(path.stem for path in (CONFIGS / "pos_emb").glob("*.yml"))
DATASETS = sorted(path.stem for path in (CONFIGS / "datasets").glob("*.yml"))
SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)
SEEDS = sorted(path.stem for path in (CONFIGS / "seeds").glob("*.yml"))


# GPT-NeoX's configurations: layers, hidden size, heads, learning rate.
NEOX_SIZES = {
    "19M": (6, 512, 8, 1e-3),
    "49M": (10, 640, 10, 8e-4),
    "125M": (12, 768, 12, 6e-4),
    "350M": (24, 1024, 16, 3e-4),
    "760M": (24, 1536, 16, 2.5e-4),
    "800M": (16, 2048, 8, 2.5e-4),
    "2-7B": (32, 2560, 32, 1.6e-4),
    "6-7B": (32, 4096, 32, 1.2e-4),
    "13B": (40, 5120, 40, 1e-4),
    "20B": (44, 6144, 64, 9.7e-5),
    "175B": (96, 12288, 96, 6e-5),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_loads(method):
    """With the large model, whose model_parallel_size is 2, if the method supports it."""
    model = "demo" if "modify_scores" in build(method, SHAPE).hooks else "1-3B"
    config = load_config([model, f"pos_emb/{method}", "datasets/github", "seeds/1235"], CONFIGS)
    assert config.model.pos_emb == method
    assert model == "demo" or config.notices == ()


def test_the_model_of_the_demo():
    config = load_config(["demo", "pos_emb/kerple_log"], CONFIGS)
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (
        4,
        128,
        128,
    )
    assert config.batch.resolve(1) == (16, 1, 16)
    assert config.evaluation.lengths == (128, 256, 512, 1024, 2048)
    assert config.checkpoint.save == "runs/demo/kerple_log/checkpoints"


@pytest.mark.parametrize(
    ("model", "batch"), [("small_bf16", 32), ("modern_162M", 32), ("1-3B", 32), ("demo", 16)]
)
def test_the_batch_does_not_depend_on_the_number_of_gpus(model, batch):
    config = load_config([model, "pos_emb/kerple_log"], CONFIGS)
    assert [config.batch.resolve(replicas) for replicas in (1, 8)] == [
        (batch, 1, batch),
        (batch // 8, 1, batch),
    ]


def test_every_run_has_its_own_folder():
    folders = set()
    for data in (*(f"datasets/{name}" for name in DATASETS), "local_setup"):
        for seed in SEEDS:
            config = load_config(
                ["small_bf16", "pos_emb/kerple_log", data, f"seeds/{seed}.yml"], CONFIGS
            )
            assert config.training.seed == int(seed)
            assert config.notices == ()
            assert config.checkpoint.load == config.checkpoint.save
            folders.add(config.checkpoint.save)
    assert len(folders) == (len(DATASETS) + 1) * len(SEEDS)


def test_small_model_of_the_paper():
    files = ["small_bf16", "pos_emb/kerple_log", "datasets/openwebtext2", "seeds/1235"]
    config = load_config(files, CONFIGS)
    model, optimizer = config.model, config.optimizer
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.head_size) == (
        12,
        768,
        12,
        64,
    )
    assert (model.seq_length, model.no_weight_tying, model.bias_gelu_fusion) == (512, True, False)
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (
        6e-4,
        (0.9, 0.999),
        1e-8,
        0.0,
    )
    assert (optimizer.gradient_clipping, config.precision.dtype) == (1.0, "bf16")
    assert (config.schedule.train_iters, config.schedule.lr_decay_iters) == (50_000, 50_000)
    assert (config.schedule.lr_decay_style, config.schedule.warmup, config.schedule.min_lr) == (
        "cosine",
        0.01,
        0.0,
    )
    assert config.schedule.lr_schedule == "neox-2022"
    assert config.batch.resolve(1) == (32, 1, 32)
    assert (config.data.split, config.data.data_path) == (
        "949,50,1",
        "data/openwebtext2/openwebtext2_text_document",
    )
    assert (config.training.eval_interval, config.checkpoint.save_interval) == (1000, 10_000)


def test_modern_model_differs_from_the_paper_s_only_in_its_blocks():
    files = ["pos_emb/kerple_log", "datasets/openwebtext2", "seeds/1235"]
    paper, modern = (load_config([name, *files], CONFIGS) for name in ("small_bf16", "modern_162M"))
    before, after = paper.to_flat(), modern.to_flat()
    assert {key for key in before.keys() & after.keys() if before[key] != after[key]} == {"norm"}
    fusions = {"scaled_upper_triang_masked_softmax_fusion", "bias_gelu_fusion"}
    sizes = {"num_kv_heads", "intermediate_size", "activation", "rms_norm_epsilon"}
    assert before.keys() - after.keys() == fusions
    assert after.keys() - before.keys() == sizes | {
        f"use_bias_in_{part}" for part in ("norms", "attn_linear", "mlp")
    }
    assert (modern.model.mlp_features, modern.model.num_kv_heads) == (2368, 4)
    assert modern.notices == ()


def test_another_method_removes_the_options_of_the_checkpoint_s_method(tmp_path):
    """Such as the rotary scaling of Llama 3."""
    before = tmp_path / "config.yml"
    scaling = '{"scaling": "llama3", "factor": 8.0, "trained_length": 8192}'
    before.write_text(f'{{"pos_emb": "rotary", "pos_emb_options": {scaling}}}')
    overrides = ["load=x", "data_path=y", "train_micro_batch_size_per_gpu=8"]
    config = load_config(["small_bf16", before, "pos_emb/kerple_log"], CONFIGS, overrides)
    assert (config.model.pos_emb, config.model.positional_options) == ("kerple_log", {})


def test_large_model_of_the_paper():
    config = load_config(["1-3B", "pos_emb/kerple_log", "datasets/github"], CONFIGS)
    assert (
        config.model.num_layers,
        config.model.hidden_size,
        config.model.num_attention_heads,
    ) == (24, 2048, 16)
    assert (config.optimizer.lr, config.schedule.train_iters, config.precision.dtype) == (
        2e-4,
        150_000,
        "fp16",
    )
    assert config.schedule.lr_schedule == "neox-2022"
    assert config.parallel.model_parallel_size == 2


def test_the_later_of_two_methods_is_used(tmp_path):
    files = ["small_bf16", "pos_emb/alibi", "pos_emb/rotary"]
    config = load_config(files, CONFIGS)
    assert config.model.pos_emb == "rotary"
    (notice,) = config.notices
    for text in ("rotary.yml", '"pos-emb"', "(line 5)", "'rotary'", "'alibi'", "alibi.yml:2"):
        assert text in notice
    more = tmp_path / "more.yml"
    more.write_text('{"pos-emb": "alibi",\n "hidden-dropout": 0.1,\n "seq-length": 128, "seed": 1}')
    notices = [
        notice for notice in load_config([*files, more], CONFIGS).notices if "overrides" in notice
    ]
    assert [notice.split(" overrides ")[0].rsplit("/")[-1] for notice in notices] == [
        "rotary.yml",
        "more.yml",
    ]
    for text in (
        "rotary.yml:5",
        "small_bf16.yml",
        '"hidden-dropout" (line 2)',
        '"seq-length" (line 3)',
        "512",
        "128",
    ):
        assert text in notices[1]
    assert_rejected(
        r'rotary\.yml:5: "pos-emb".*alibi\.yml:2', load_config, files, CONFIGS, strict=True
    )


@pytest.mark.parametrize("name", NEOX_SIZES)
def test_configurations_of_gpt_neox(name):
    *sizes, lr = NEOX_SIZES[name]
    config = load_config([name, "local_setup", "text_generation"], CONFIGS)
    assert config.notices == ()
    model, schedule = config.model, config.schedule
    assert [model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length] == [
        *sizes,
        2048,
    ]
    assert (config.optimizer.lr, schedule.min_lr, schedule.lr_decay_style) == (
        lr,
        pytest.approx(lr / 10),
        "cosine",
    )
    assert (model.pos_emb, model.init_method, model.output_layer_init_method) == (
        "rotary",
        "small_init",
        "wang_init",
    )
    assert (config.precision.dtype, config.optimizer.zero_stage) == ("fp16", 1)
    assert (config.data.data_path, config.generation.num_samples) == (
        "data/enwik8/enwik8_text_document",
        10,
    )
    with_kerple = load_config([name, "pos_emb/kerple_log", "datasets/python_stdlib"], CONFIGS)
    assert with_kerple.model.pos_emb == "kerple_log"
    rotary = [f"rotary_pct {model.rotary_pct} has no effect with pos_emb kerple_log"] * (
        model.rotary_pct < 1
    )
    assert list(with_kerple.notices[1:]) == rotary
