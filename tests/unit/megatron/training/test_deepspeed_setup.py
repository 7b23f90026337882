"""The configuration and the patches of DeepSpeed."""

import math
import sys

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron.config import UserError
from megatron.training import deepspeed_setup
from megatron.training.deepspeed_setup import (
    DeviceOnlyBF16Optimizer,
    PatchedZeroOptimizer,
    deepspeed_curriculum,
    deepspeed_dict,
    global_norm,
)
from megatron.training.engine import Engine
from tests.support.configs import make_config
from tests.support.runs import metrics, trained


def test_the_bf16_optimizer_needs_found_inf(tmp_path, data_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"], "adam", lambda params, grads, found_inf=None: None
    )
    with pytest.raises(UserError, match=r"torch\.optim\.adam\.adam.*grad_scale"):
        trained(tmp_path, data_path, precision="bfloat16", save=None, load=None)


@pytest.mark.parametrize("clipping", [0.0, 0.25])
def test_gradients_are_clipped_by_the_norm_in_the_log(clipping, tmp_path, data_path, monkeypatch):
    """In fp32 without ZeRO, against torch's own function."""
    step, norms = Engine.train_step, []

    def recorded(engine, *arguments):
        def expected_gradients(optimizer, *_):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norms.append(torch.nn.utils.get_total_norm(gradients).item())

        handle = engine.deepspeed.optimizer.register_step_pre_hook(expected_gradients)
        loss = step(engine, *arguments)
        handle.remove()
        return loss

    monkeypatch.setattr(Engine, "train_step", recorded)
    trained(tmp_path, data_path, gradient_clipping=clipping, save=None, load=None)
    logged = list(metrics(tmp_path, "train/grad_norm").values())
    assert all(1 < norm < 100 for norm in logged)
    assert norms == pytest.approx([clipping] * 6 if clipping else logged, rel=1e-5)


def test_the_norm_of_a_stage_that_has_only_copies():
    assert global_norm([], None) == 0


@pytest.mark.parametrize("optimizer", ["Adam", "Muon"])
def test_a_step_whose_gradient_is_not_finite_is_skipped_in_fp32(
    optimizer, tmp_path, data_path, monkeypatch
):
    step, weights = Engine.train_step, []

    def with_nan_in_step_3(engine, *arguments):
        parameter = engine.model.blocks[0].attention.query_key_value.weight
        handle = parameter.register_hook(
            lambda gradient: gradient * (torch.nan if len(weights) == 2 else 1.0)
        )
        loss = step(engine, *arguments)
        handle.remove()
        weights.append([parameter.detach().clone() for parameter in engine.model.parameters()])
        return loss

    monkeypatch.setattr(Engine, "train_step", with_nan_in_step_3)
    keys = {"type": optimizer, "params": {"lr": 0.001}}
    trained(tmp_path, data_path, optimizer=keys, save=None, load=None)
    assert all(map(torch.equal, weights[2], weights[1]))
    assert not any(map(torch.equal, weights[3], weights[2]))
    assert metrics(tmp_path, "train/skipped_steps")[6] == 1


@pytest.mark.parametrize(("clipping", "tolerance"), [(0.25, 5e-4), (0.0, 1e-6)])
@pytest.mark.quick(1)
def test_the_bf16_optimizer_updates_like_upstream(
    clipping, tolerance, tmp_path, data_path, monkeypatch
):
    """With gradient accumulation, and a parameter that gets no gradient in one micro-batch, then in
    a whole step.

    Dividing by 1 / scale instead of multiplying by scale changes the last bit, which can change a
    rounded weight. The learning rate is low, because training amplifies such differences.
    """
    update = BF16_Optimizer.update_hp_grads, DeviceOnlyBF16Optimizer.update_hp_grads
    calls = []

    def with_missing_gradients(upstream):
        def update_hp_grads(optimizer, **keywords):
            calls.append(type(optimizer))
            if len(calls) % 12 in (2, 5, 7, 8):
                optimizer.bf16_groups[0][1].grad = None
            update[not upstream](optimizer, **keywords)

        return update_hp_grads

    monkeypatch.setattr(BF16_Optimizer, "update_hp_grads", with_missing_gradients(upstream=True))
    monkeypatch.setattr(
        DeviceOnlyBF16Optimizer, "update_hp_grads", with_missing_gradients(upstream=False)
    )
    keys = {
        "precision": "bfloat16",
        "gradient_clipping": clipping,
        "gradient_accumulation_steps": 2,
    }
    keys |= {"optimizer": {"type": "Adam", "params": {"lr": 0.002}}, "load": None}
    trained(tmp_path / "ours", data_path, **keys)
    monkeypatch.setattr(deepspeed_setup, "DeviceOnlyBF16Optimizer", BF16_Optimizer)
    trained(tmp_path / "upstream", data_path, **keys)
    assert calls == [DeviceOnlyBF16Optimizer] * 12 + [BF16_Optimizer] * 12
    for name in ("train/loss", "train/grad_norm"):
        assert metrics(tmp_path / "ours", name) == pytest.approx(
            metrics(tmp_path / "upstream", name), rel=tolerance, abs=0.0
        )


@pytest.mark.parametrize(("precision", "stage"), [("fp16", 2), ("fp32", 1), ("bfloat16", 2)])
@pytest.mark.quick(1)
def test_the_zero_optimizer_updates_like_upstream(
    precision, stage, tmp_path, data_path, monkeypatch
):
    """In fp16, with an initial loss scale at which the first steps overflow and are skipped.

    Upstream computes the norm in float64. The last bit of a float32 norm can change a rounded
    weight and later losses.
    """
    keys = {
        "precision": precision,
        "gradient_clipping": 0.25,
        "zero_optimization": {"stage": stage},
        "load": None,
    }
    keys |= (
        {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
        if precision == "fp16"
        else {}
    )
    # With this seed, no rounded weight differs.
    keys |= {"pipe_parallel_size": 0, "seed": 3}
    for folder, optimizer_class in (
        ("ours", PatchedZeroOptimizer),
        ("upstream", DeepSpeedZeroOptimizer),
    ):
        monkeypatch.setattr(deepspeed_setup, "PatchedZeroOptimizer", optimizer_class)
        trained(tmp_path / folder, data_path, **keys)
    norms = metrics(tmp_path / "ours", "train/grad_norm").values()
    assert {math.isinf(norm) for norm in norms} == (
        {True, False} if precision == "fp16" else {False}
    )
    for name, tolerance in (
        ("train/loss", 1e-5),
        ("train/grad_norm", 1e-4),
        ("train/loss_scale", 0.0),
    ):
        assert metrics(tmp_path / "ours", name) == pytest.approx(
            metrics(tmp_path / "upstream", name), rel=tolerance
        )


def test_a_single_replica_does_not_copy_its_gradients(tmp_path, data_path, monkeypatch, caplog):
    """And DeepSpeed's messages at startup are hidden."""
    monkeypatch.setattr(
        DeepSpeedEngine, "allreduce_bucket", lambda *_: pytest.fail("all-reduce of one rank")
    )
    trained(tmp_path, data_path, train_iters=1, save=None, load=None)
    assert "DeepSpeedEngine configuration" not in caplog.text


def test_a_bf16_step_with_a_gradient_that_is_not_finite_is_skipped(
    tmp_path, data_path, monkeypatch, capsys
):
    """Weights, master weights and optimizer state do not change, and the next step is normal."""
    step, unchanged = Engine.train_step, []

    def state(engine):
        optimizer = engine.deepspeed.optimizer
        assert isinstance(optimizer, DeviceOnlyBF16Optimizer)
        moments = [
            value for state in optimizer.optimizer.state.values() for value in state.values()
        ]
        tensors = (*engine.model.parameters(), *optimizer.fp32_groups_flat_partition, *moments)
        return [tensor.clone() for tensor in tensors]

    def broken(engine, batches, learning_rate, iteration):
        before = state(engine)
        weight = next(engine.model.parameters())
        factor = float("nan") if iteration == 3 else 1.0
        handle = weight.register_hook(lambda gradient: gradient * factor)
        loss = step(engine, batches, learning_rate, iteration)
        handle.remove()
        after = state(engine)
        unchanged.append(len(before) == len(after) and all(map(torch.equal, before, after)))
        return loss

    monkeypatch.setattr(Engine, "train_step", broken)
    trained(tmp_path, data_path, save=None, load=None, precision="bfloat16")
    assert unchanged == [iteration == 3 for iteration in range(6)]
    norms = metrics(tmp_path, "train/grad_norm")
    assert [math.isinf(norm) for norm in norms.values()] == unchanged
    assert all(math.isfinite(loss) for loss in metrics(tmp_path).values())
    assert "bf16_optimizer" not in capsys.readouterr().out  # DeepSpeed's memory reports


def settings(data_parallel_size: int = 1, **keys: object) -> dict:
    return deepspeed_dict(make_config(train_micro_batch_size_per_gpu=2, **keys), data_parallel_size)


def test_fp32():
    fp32 = settings(4, gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert fp32["train_batch_size"] == 24
    assert fp32["train_micro_batch_size_per_gpu"] == 2
    assert fp32["gradient_accumulation_steps"] == 3
    assert fp32["gradient_clipping"] == 0.5
    assert fp32["zero_optimization"] == {"stage": 0}
    assert (
        not {"optimizer", "scheduler", "fp16", "bf16", "communication_data_type", "data_types"}
        & fp32.keys()
    )


def test_the_norm_is_computed_without_clipping():
    assert settings(gradient_clipping=0.0)["gradient_clipping"] == float("inf")
    assert (
        settings(gradient_clipping=0.0, zero_optimization={"stage": 1})["gradient_clipping"] == 0.0
    )


def test_fp16_and_bf16():
    fp16 = settings(fp16={"enabled": True, "loss_scale": 128, "hysteresis": 3})
    assert fp16["fp16"]["enabled"] is True
    assert (fp16["fp16"]["loss_scale"], fp16["fp16"]["hysteresis"]) == (128, 3)
    assert "bf16" not in fp16
    bf16 = settings(fp16={"enabled": True, "type": "bfloat16"}, fp32_allreduce=True)
    assert bf16["bf16"] == {"enabled": True}
    assert bf16["data_types"] == {"grad_accum_dtype": "fp32"}
    assert bf16["communication_data_type"] == "fp32"
    assert "fp16" not in bf16
    assert fp16["zero_optimization"] == bf16["zero_optimization"] == {"stage": 1}, "instead of 0"


def test_zero_keys_are_passed_on():
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "cpu_offload": False}
    expected = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    assert settings(zero_optimization=zero)["zero_optimization"] == expected


def test_extra_arguments_are_passed_on():
    extra = {"comms_logger": {"enabled": True}, "wall_clock_breakdown": True}
    assert settings(deepspeed_extra_args=extra).items() >= extra.items()


def test_the_curriculum_is_that_of_gpt_neox():
    """The lengths of the first steps, which GPT-NeoX counts from 1, of each type of schedule."""
    for schedule_type, schedule, expected in (
        ("fixed_discrete", {"difficulty": [8, 16, 32], "max_step": [2, 4]}, [8, 8, 16, 16, 32, 32]),
        (
            "fixed_linear",
            {"total_curriculum_step": 4, "difficulty_step": 8},
            [8, 16, 24, 32, 32, 32],
        ),
        (
            "fixed_root",
            {"total_curriculum_step": 4, "difficulty_step": 4, "root_degree": 2},
            [20, 24, 28, 32, 32, 32],
        ),
    ):
        keys = {"enabled": True, "min_difficulty": 8, "max_difficulty": 32}
        keys |= {"schedule_type": schedule_type, "schedule_config": schedule}
        config = make_config(
            **{"seq-length": 32, "curriculum_learning": keys}, train_micro_batch_size_per_gpu=2
        )
        scheduler = CurriculumScheduler(deepspeed_curriculum(config))
        assert [scheduler.get_difficulty(step) for step in range(1, 7)] == expected
