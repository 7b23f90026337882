"""Parameter groups, bounds of parameters, and learning rates against those of GPT-NeoX and the
release.
"""

import math

import pytest
import torch
from lion_pytorch import Lion

from megatron.checkpoint.layers import load_layers
from megatron.config import Config
from megatron.data.datasets import build_datasets
from megatron.data.loader import Loader
from megatron.model.gpt import GPT
from megatron.model.settings import ModelSettings
from megatron.optimizers.registry import OPTIMIZERS
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.training.loop import train
from megatron.training.optimizer import Schedule, parameter_groups
from tests.support.errors import assert_rejected
from tests.support.language_models import model_settings
from tests.support.runs import (
    copy_checkpoint,
    metrics,
    trained,
    training_settings,
    unwrapped,
    weights,
)

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 16}
LR, MIN_LR = 6e-4, 6e-5
# Pythia's sizes: min_lr is a tenth of lr, 143,000 steps, 1 % of them warmup.
T, W = 143_000, 1430.0
# Computed by the AnnealingLR of GPT-NeoX, May 2026 (19f294d5), and of the KERPLE release.
STEPS = (0, 1, 700, 1430, 1431, 71_500, 115_259, 142_999, 143_000)
WARMUP = (4.1958042e-07, 4.1958042e-07, 0.000293706294, 0.0006)
WARMUP_2022 = (0.0, *WARMUP[1:])
REFERENCE = {
    ("neox", "cosine"): (*WARMUP, 0.0006, 0.00033428381, 0.00010956515, 6.00000001e-05, 6e-05),
    ("neox", "linear"): (*WARMUP, 0.000599995762, 0.000303030303, 0.000117571519, 6e-05, 6e-05),
    ("neox", "exponential"): (
        *WARMUP,
        0.000599997063,
        0.000425782927,
        0.000343684732,
        0.000300045626,
        0.000300044157,
    ),
    ("neox", "constant"): (*WARMUP, *[0.0006] * 5),
    ("neox-2022", "cosine"): (*WARMUP_2022, 0.0006, 0.000309423228, 6e-05, 6e-05, 6e-05),
    ("neox-2022", "linear"): (*WARMUP_2022, 0.000599995804, 0.000306, 0.000122395804, 6e-05, 6e-05),
    ("neox-2022", "exponential"): (
        *(*WARMUP_2022, 0.000599997092, 0.00042724587, 0.000345605105),
        *(0.000304231722, 0.000304231722),
    ),
    ("neox-2022", "constant"): (*WARMUP_2022, *[0.0006] * 5),
}


@pytest.mark.parametrize(("version", "style"), REFERENCE)
def test_learning_rates_are_those_of_gpt_neox_and_of_the_release(version, style):
    schedule = Schedule(LR, style, T, W, MIN_LR, version)
    assert [schedule(step) for step in STEPS] == pytest.approx(
        list(REFERENCE[version, style]), rel=1e-8
    )


def test_after_the_decay():
    """GPT-NeoX's cosine would rise again."""
    values = {
        style: Schedule(LR, style, T, W, MIN_LR)(150_000)
        for style in ("cosine", "linear", "exponential")
    }
    assert values == pytest.approx(
        {"cosine": MIN_LR, "linear": MIN_LR, "exponential": 0.0002899370762}, rel=1e-8
    )


def test_without_warmup_and_with_nothing_else():
    """With a warmup of less than one step, GPT-NeoX would begin with 20 times the learning rate."""
    assert Schedule(1.0, "constant", 5, 0.05)(0) == 1.0
    assert Schedule(1.0, "linear", 100, 0.0)(0) == 1.0
    assert Schedule(1.0, "linear", 100, 0.0)(25) == 0.75
    assert Schedule(1.0, "cosine", 100, 100.0)(100) == 1.0
    assert Schedule(1.0, "cosine", 100, 100.0, min_lr=0.1)(101) == pytest.approx(0.1)
    assert 1.8e-5 + (6e-5 - 1.8e-5) > 6e-5  # rounded up
    assert Schedule(6e-5, "cosine", 10**10, 0.0, min_lr=1.8e-5)(1) == 6e-5


@pytest.mark.parametrize("version", ["neox", "neox-2022"])
@pytest.mark.parametrize("style", ["cosine", "linear", "exponential", "constant"])
@pytest.mark.parametrize(
    ("decay", "warmup"), [(10, 50), (10, 10), (10, 6.7), (24, 23), (100, 67.0), (5, 10)]
)
def test_the_learning_rate_stays_between_min_lr_and_lr(version, style, decay, warmup):
    """Whatever the warmup: a recipe that is shortened for a smoke run keeps its warmup_iters."""
    rates = [Schedule(1e-2, style, decay, warmup, 1e-3, version)(step) for step in range(120)]
    assert all(0 <= rate <= 1e-2 for rate in rates)
    assert rates[1 : int(warmup)] == sorted(rates[1 : int(warmup)])
    assert all(1e-3 <= rate <= 1e-2 for rate in rates[int(warmup) + 1 :])


def test_a_shortened_recipe_stays_in_its_warmup(tmp_path, data_path):
    keys = {
        "warmup_iters": 50,
        "train_iters": 4,
        "lr_decay_iters": None,
        "lr_schedule": "neox-2022",
    }
    keys |= {"warmup": None, "save": None, "load": None}
    keys["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2}}
    trained(tmp_path, data_path, **keys)
    assert metrics(tmp_path, "train/learning_rate") == pytest.approx(
        {1: 0.0, 2: 2e-4, 3: 4e-4, 4: 6e-4}
    )


@pytest.mark.parametrize("keys", [{"warmup_iters": 10}, {"warmup": 1.0}])
def test_a_warmup_beyond_the_decay_is_rejected(keys, tmp_path, data_path):
    settings = training_settings(tmp_path, data_path, **{"warmup": None, **keys}, lr_decay_iters=5)
    assert_rejected(rf"{next(iter(keys))} .*lr_decay_iters", Config.from_flat, settings)


def test_a_schedule_that_does_not_continue_the_run():
    usual = Schedule(1.0, "cosine", 100, 1, min_lr=0.1)
    assert usual.jump(0, None) is None
    assert usual.jump(50, usual(49)) is None
    # A finished run of 20 steps that continues to step 30: the linear decay starts again.
    jump = Schedule(3e-3, "linear", 30, 0.3).jump(20, Schedule(3e-3, "linear", 20, 0.2)(19))
    assert "0.000152 to 0.00101" in jump
    # A tenth of the larger rate is no jump.
    constant = Schedule(1.0, "constant", 100, 0.0)
    assert constant.jump(5, 0.905) is constant.jump(5, 1.1) is None
    assert constant.jump(5, 0.895) is not None
    assert constant.jump(5, 1.12) is not None


def test_a_run_follows_the_schedule(tmp_path, data_path, capsys):
    """A resumed run keeps the formulas of its checkpoint, unless the configuration sets them."""
    keys = {"warmup": 0.2, "lr_decay_iters": 10, "eval_iters": 0}

    def rates(**more: object) -> dict[int, float]:
        (tmp_path / "logs/metrics.jsonl").unlink(missing_ok=True)
        trained(tmp_path, data_path, **keys, **more)
        return metrics(tmp_path, "train/learning_rate")

    expected_2022 = {1: 0.0, 2: 0.0025, 3: 0.005, 4: 0.005 * 0.97553}
    assert rates(train_iters=4, lr_schedule="neox-2022", save_interval=4) == pytest.approx(
        expected_2022, rel=1e-3
    )
    assert "10 steps with 2 of warmup; formulas: lr-schedule neox-2022" in unwrapped(
        capsys.readouterr().out
    )
    assert rates(train_iters=5, save_interval=5) == pytest.approx({5: 0.005 * 0.90451}, rel=1e-3)
    assert rates(train_iters=6, lr_schedule="neox") == pytest.approx({6: 0.005 * 0.69134}, rel=1e-3)


def test_only_matrices_of_a_method_have_weight_decay():
    for pos_emb, expected in (
        ("dape_kerple", {"first.weight", "second.weight"}),
        ("dape_v2", {"first.weight", "second.weight"}),
        ("fire", {"first.weight", "second.weight"}),
        ("transformer_xl", {"relative.weight"}),
        ("cope", set()),
        ("rpe", set()),
        ("kerple_log", set()),
    ):
        model = GPT(model_settings(**SHAPE, pos_emb=pos_emb))
        decayed = {id(parameter) for parameter in parameter_groups(model, 0.1)[0]["params"]}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
        assert {name.split(".rpe.")[1] for name in names if ".rpe." in name} == expected


@pytest.mark.parametrize("pos_emb", ["none", "dape_kerple"])
def test_matrices_of_blocks_without_those_of_a_method(pos_emb):
    model = GPT(model_settings(**SHAPE, pos_emb=pos_emb))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices = set()
    for group in parameter_groups(model, 0.1, separates_matrices=True):
        if "matrices" in group:
            matrices |= {names[id(parameter)].split(".", 1)[1] for parameter in group["params"]}
    assert matrices == {
        "attention.query_key_value.weight",
        "attention.dense.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    }


def test_parameters_with_the_same_bounds_are_a_group():
    model = GPT(model_settings(**SHAPE, pos_emb="kerple_bias_wht"))
    names = {
        id(parameter): name.rpartition(".rpe.")[2] for name, parameter in model.named_parameters()
    }
    groups = parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    bounded = {
        group["bounds"]: {names[id(p)] for p in group["params"]}
        for group in groups
        if "bounds" in group
    }
    assert bounded == {(0.01, None): {"bias_a", "wei_a"}, (0.01, 2.0): {"bias_p", "wei_p"}}
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0, 0.0]


def test_learning_rate_of_positional_parameters(tmp_path, data_path, capsys):
    """Adam's first step has the size of the learning rate. The loss does not depend on the last
    bias of DAPE's MLP.
    """
    keys = {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "warmup": 0.0,
        "gradient_clipping": 0.0,
    }
    keys |= {
        "lr_decay_style": "constant",
        "train_iters": 1,
        "pos_emb": "dape_kerple",
        "load": None,
        "seed": 3,
    }
    frozen = weights(trained(tmp_path / "frozen", data_path, **keys, positional_lr_factor=0.0), 1)
    after = weights(trained(tmp_path / "faster", data_path, **keys, positional_lr_factor=10.0), 1)
    assert (
        unwrapped(capsys.readouterr().out).count(
            "learning rate of the positional parameters: 10 times"
        )
        == 1
    )
    assert any(".rpe." in name for name in frozen)
    for name, start in frozen.items():
        size = float((after[name] - start).abs().max())
        if name.endswith(".rpe.second.bias"):
            assert size <= 1.02e-2, "its gradient is 0, except for rounding"
        elif ".rpe." in name:
            assert size == pytest.approx(1e-2, rel=0.02), name
        else:
            torch.testing.assert_close(after[name], start, rtol=0, atol=0)


def test_groups_of_positional_parameters_with_their_own_learning_rate():
    model = GPT(model_settings(**SHAPE, pos_emb="dape_kerple"))
    groups = parameter_groups(model, 0.1, 10.0)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [
        (group["weight_decay"], group.get("lr_factor"), group.get("bounds")) for group in groups
    ] == [
        *[(0.1, None, None), (0.1, 10.0, None), (0.0, None, None), (0.0, 10.0, None)],
        (0.0, 10.0, (0.01, None)),
    ]


@pytest.mark.parametrize(("precision", "zero_stage"), [("fp32", 0), ("bfloat16", 3)])
@pytest.mark.quick(1)
def test_checkpoints_contain_parameters_within_their_bounds(
    precision, zero_stage, tmp_path, data_path
):
    """The weights, and the fp32 master weights to which the optimizer adds steps of 0.8."""
    keys = {
        "pos_emb": "kerple_power",
        "precision": precision,
        "zero_optimization": {"stage": zero_stage},
    }
    keys |= {
        "optimizer": {"type": "Adam", "params": {"lr": 0.8}},
        "warmup": 0.0,
        "gradient_clipping": 0.0,
    }
    keys |= {"lr_decay_style": "constant", "pipe_parallel_size": 0, "load": None}
    trained(tmp_path, data_path, **keys)
    optimizer = torch.load(
        tmp_path / "checkpoints/global_step6/optimizer_rank_00000.pt", weights_only=True
    )
    for name, high in (("bias_a", math.inf), ("bias_p", 2.0)):
        values = weights(tmp_path, 6)[f"layer_02-model_00-model_states.pt/attention.rpe.{name}"]
        master = optimizer["parameters"][f"positional.{name}"].get("master", values.flatten())
        assert ((master >= 0.01 - 1e-9) & (master <= high)).all()
        assert ((master - 0.01).abs() < 1e-8).any() or (master == high).any()
        torch.testing.assert_close(values.float().flatten(), master.to(values.dtype).float())


# -- every optimizer, compared with its library's on an ordinary model
# -------------------------------------------------

LEARNING_RATE, FACTOR, DECAY, STEPS_COMPARED = 0.003, 5.0, 0.1, 20


def optimizer_keys(name, params):
    if name == "adam8bit":
        return {"optimizer": {"type": "Adam", "params": params}, "use_bnb_optimizer": True}
    return {"optimizer": {"type": name, "params": params}}


def library_optimizers(name, parameters):
    """The library's own optimizers for named parameters, built by name instead of by module."""
    kernel = [p for n, p in parameters.items() if ".rpe." in n]
    bounded_or_small = {id(p) for p in (*kernel, *(p for p in parameters.values() if p.dim() < 2))}
    decayed = [p for p in parameters.values() if id(p) not in bounded_or_small]
    small = [p for n, p in parameters.items() if p.dim() < 2 and ".rpe." not in n]
    matrices = [p for n, p in parameters.items() if n.startswith(("2.", "3.")) and p.dim() == 2]
    others = [
        {
            "params": [p for p in decayed if name != "muon" or all(p is not m for m in matrices)],
            "weight_decay": DECAY,
        },
        {"params": small, "weight_decay": 0.0},
        {"params": kernel, "weight_decay": 0.0, "lr": LEARNING_RATE * FACTOR},
    ]
    if name == "lion":
        return [Lion(others, lr=LEARNING_RATE, betas=(0.9, 0.99))]
    if name == "sgd":
        return [torch.optim.SGD(others, lr=LEARNING_RATE, momentum=0.9, nesterov=True)]
    if name == "adafactor":
        return [torch.optim.Adafactor(others, lr=LEARNING_RATE)]
    if name == "adam8bit":
        from bitsandbytes.optim import (
            Adam8bit,
        )  # not at the top: it imports torch's compiler, which is slow

        return [Adam8bit(others, lr=LEARNING_RATE)]
    adam = torch.optim.AdamW(others, lr=LEARNING_RATE, fused=name == "muon")
    if name != "muon":
        return [adam]
    muon = torch.optim.Muon(
        matrices, lr=LEARNING_RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adam]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
@pytest.mark.quick(3)
def test_updates_are_those_of_the_library(name, tmp_path, data_path):
    """In fp32, without DeepSpeed. Muon computes in bfloat16, which amplifies differences in
    rounding: no clipping, and the same implementation of AdamW.
    """
    clipping = 0.0 if name == "muon" else 1.0
    params = {"lr": LEARNING_RATE, **({"momentum": 0.9, "nesterov": True} if name == "sgd" else {})}
    keys = {**optimizer_keys(name, params), "weight_decay": DECAY, "positional_lr_factor": FACTOR}
    keys |= {"warmup": 0.0, "lr_decay_style": "constant", "train_iters": STEPS_COMPARED}
    keys |= {
        "save_interval": STEPS_COMPARED,
        "extra_save_iters": [0],
        "eval_iters": 0,
        "train_batch_size": 4,
    }
    keys |= {"gradient_clipping": clipping}
    config = Config.from_flat(training_settings(tmp_path, data_path, **keys))
    train(config)
    losses = metrics(tmp_path)

    model = GPT(ModelSettings(config.model, padded_vocab_size=512))
    load_layers(model.layers(), tmp_path / "checkpoints/global_step0")
    parameters = {
        f"{index}.{name}": parameter
        for index, layer in model.layers().items()
        for name, parameter in layer.named_parameters()
    }
    parameters = {
        name: p for name, p in parameters.items() if not name.startswith("3.attention.rpe.")
    }  # shared
    optimizers = library_optimizers(name, parameters)
    datasets = build_datasets(
        config, build_tokenizer("CharLevelTokenizer"), 32, (4 * STEPS_COMPARED, 0, 0), None
    )
    batches = iter(Loader(datasets.train, micro_batch_size=4))
    for number in range(1, STEPS_COMPARED + 1):
        batch = next(batches)
        loss = model.loss(batch["tokens"], batch["labels"])
        assert losses[number] == pytest.approx(loss.item(), abs=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), clipping or math.inf)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for parameter in (
                parameters["2.attention.rpe.bias_p"],
                parameters["2.attention.rpe.bias_a"],
            ):
                parameter.clamp_(min=0.01)
    for key, tensor in weights(tmp_path, STEPS_COMPARED).items():
        layer, _, rest = key.partition("-model_00-model_states.pt/")
        expected = parameters.get(f"{int(layer.removeprefix('layer_'))}.{rest}")
        if expected is not None:
            assert (tensor - expected).abs().max() < 1e-5, key


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("lion", "fp16"),
        ("adam8bit", "bfloat16"),
        *(
            pytest.param(name, "bfloat16", marks=pytest.mark.ci)
            for name in ("sgd", "muon", "adafactor")
        ),
    ],
)
def test_resuming_is_exact(name, precision, tmp_path, data_path):
    """Weights, optimizer state and float32 weights. In bfloat16, the losses are close to those in
    fp32.
    """
    params = {"lr": 0.002, **({"momentum": 0.9} if name == "sgd" else {})}
    keys = {**optimizer_keys(name, params), "precision": precision, "eval_iters": 0}
    keys |= {"train_iters": 4, "save_interval": 2, "lr_decay_iters": 4}
    trained(tmp_path / "whole", data_path, **keys)
    copy_checkpoint(tmp_path / "whole", tmp_path / "resumed", 2)
    trained(tmp_path / "resumed", data_path, **keys)
    expected, resumed = weights(tmp_path / "whole", 4), weights(tmp_path / "resumed", 4)
    assert all(torch.equal(resumed[key], tensor) for key, tensor in expected.items())
    states = [
        torch.load(
            tmp_path / run / "checkpoints/global_step4/optimizer_rank_00000.pt", weights_only=True
        )["parameters"]
        for run in ("whole", "resumed")
    ]
    entry = states[0][
        "2.attention.dense.weight" if name != "adam8bit" else "0.word_embeddings.weight"
    ]
    if name == "adam8bit":
        assert entry["state1"].dtype == entry["state2"].dtype == torch.uint8
        assert entry["absmax1"].shape == entry["absmax2"].shape == (entry["state1"].numel() // 256,)
    kinds = {"row_var", "col_var"} if name == "adafactor" else {OPTIMIZERS[name].state_tensors[0]}
    kinds = set(OPTIMIZERS[name].state_tensors) if name == "adam8bit" else kinds
    kinds |= {"master"} if precision != "fp32" else set()
    assert {kind for kind, value in entry.items() if torch.is_tensor(value)} == kinds
    for key, entry in states[0].items():
        assert entry.keys() == states[1][key].keys()
        for kind, value in entry.items():
            other = states[1][key][kind]
            assert torch.equal(value, other) if torch.is_tensor(value) else value == other, (
                key,
                kind,
            )
    if precision == "bfloat16":
        keys = {**keys, "precision": "fp32", "save": None, "load": None}
        trained(tmp_path / "fp32", data_path, **keys)
        assert metrics(tmp_path / "whole") == pytest.approx(metrics(tmp_path / "fp32"), abs=0.01)
