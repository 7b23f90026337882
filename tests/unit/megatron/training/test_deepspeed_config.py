"""DeepSpeed's configuration: what it contains, and that DeepSpeed accepts it."""

import pytest
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

from megatron.config import Config, UserError
from megatron.training.deepspeed_config import deepspeed_curriculum, deepspeed_dict

SMALL = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "pos-emb": "kerple_log",
    "train_micro_batch_size_per_gpu": 2,
}


def settings(data_parallel_size: int = 1, **keys: object) -> dict:
    return deepspeed_dict(Config.from_flat({**SMALL, **keys}), data_parallel_size)


def test_fp32():
    fp32 = settings(4, gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert fp32["train_batch_size"] == 24
    assert fp32["train_micro_batch_size_per_gpu"] == 2
    assert fp32["gradient_accumulation_steps"] == 3
    assert fp32["gradient_clipping"] == 0.5
    assert fp32["zero_optimization"] == {"stage": 0}
    assert not {"optimizer", "scheduler", "fp16", "bf16", "communication_data_type", "data_types"} & fp32.keys()


def test_the_norm_is_computed_without_clipping():
    assert settings(gradient_clipping=0.0)["gradient_clipping"] == float("inf")
    assert settings(gradient_clipping=0.0, zero_optimization={"stage": 1})["gradient_clipping"] == 0.0


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


@pytest.mark.parametrize("precision", ["fp16", "bfloat16"])
def test_half_precision_runs_stage_0_as_stage_1(precision):
    assert settings(precision=precision)["zero_optimization"] == {"stage": 1}


def test_zero_keys_are_passed_on():
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "cpu_offload": False}
    expected = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    assert settings(zero_optimization=zero)["zero_optimization"] == expected


def test_extra_keys_are_passed_on_unless_other_keys_set_them():
    extra = settings(deepspeed_extra_args={"comms_logger": {"enabled": True}})
    assert extra["comms_logger"] == {"enabled": True}
    assert extra["timers"] == {"throughput": {"enabled": False}}
    timers = {"throughput": {"enabled": True}}
    assert settings(deepspeed_extra_args={"timers": timers})["timers"] == timers
    for key in ("train_batch_size", "optimizer", "fp16"):
        with pytest.raises(UserError, match=rf"deepspeed_extra_args\.{key}.*set from other keys"):
            settings(deepspeed_extra_args={key: 1})


def test_batch_sizes_must_fit():
    with pytest.raises(UserError, match="train_batch_size 5"):
        settings(train_batch_size=5)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("data_types", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}),
        ("pipeline", {}),
    ],
)
def test_settings_from_other_keys_cannot_be_given_twice(name, keys):
    with pytest.raises(UserError, match=rf"deepspeed_extra_args\.{name}.: remove it"):
        settings(deepspeed_extra_args={name: {}}, **keys)


def test_deepspeed_accepts_it(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    keys = {"fp16": {"enabled": True}, "fp32_allreduce": True, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    accepted = DeepSpeedConfig(settings(**keys))
    assert accepted.train_batch_size == 2
    assert accepted.float16_config.enabled
    assert accepted.zero_config.stage == 1
    assert accepted.gradient_clipping == 1.0


def test_the_curriculum_is_that_of_gpt_neox():
    """The lengths of the first steps, which GPT-NeoX counts from 1, of each type of schedule."""
    for schedule_type, schedule, expected in (
        ("fixed_discrete", {"difficulty": [8, 16, 32], "max_step": [2, 4]}, [8, 8, 16, 16, 32, 32]),
        ("fixed_linear", {"total_curriculum_step": 4, "difficulty_step": 8}, [8, 16, 24, 32, 32, 32]),
        ("fixed_root", {"total_curriculum_step": 4, "difficulty_step": 4, "root_degree": 2}, [20, 24, 28, 32, 32, 32]),
    ):
        keys = {"enabled": True, "min_difficulty": 8, "max_difficulty": 32}
        keys |= {"schedule_type": schedule_type, "schedule_config": schedule}
        config = Config.from_flat({**SMALL, "seq-length": 32, "curriculum_learning": keys})
        scheduler = CurriculumScheduler(deepspeed_curriculum(config))
        assert [scheduler.get_difficulty(step) for step in range(1, 7)] == expected
