"""DeepSpeed's configuration is accepted by DeepSpeed's own reader, and says what ours says."""

import pytest

from megatron.config import Config, UserError


def test_fp32(flat):
    made = Config.from_flat({**flat, "gradient_accumulation_steps": 3, "gradient_clipping": 0.5}).deepspeed_dict(4)
    assert made["train_batch_size"] == 24
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 3
    assert made["gradient_clipping"] == 0.5
    assert made["zero_optimization"] == {"stage": 0}
    for absent in ("optimizer", "scheduler", "fp16", "bf16", "communication_data_type"):
        assert absent not in made


def test_fp16_and_bf16(flat):
    fp16 = Config.from_flat({**flat, "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 3}}).deepspeed_dict(1)
    assert fp16["fp16"]["enabled"] is True
    assert (fp16["fp16"]["loss_scale"], fp16["fp16"]["hysteresis"]) == (128, 3)
    assert "bf16" not in fp16
    bf16 = Config.from_flat({**flat, "fp16": {"enabled": True, "type": "bfloat16"}, "fp32_allreduce": True})
    assert bf16.deepspeed_dict(1)["bf16"] == {"enabled": True}
    assert bf16.deepspeed_dict(1)["communication_data_type"] == "fp32"
    assert "fp16" not in bf16.deepspeed_dict(1)


def test_zero_keys_are_handed_over(flat):
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "cpu_offload": False}
    made = Config.from_flat({**flat, "zero_optimization": zero}).deepspeed_dict(1)
    assert made["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    made = Config.from_flat({**flat, "zero_optimization": {**zero, "cpu_offload": True}}).deepspeed_dict(1)
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_extra_keys_are_handed_over_unless_set_otherwise(flat):
    made = Config.from_flat({**flat, "deepspeed_extra_args": {"comms_logger": {"enabled": True}}}).deepspeed_dict(1)
    assert made["comms_logger"] == {"enabled": True}
    for key in ("train_batch_size", "optimizer", "fp16"):
        config = Config.from_flat({**flat, "deepspeed_extra_args": {key: 1}})
        with pytest.raises(UserError, match=f"deepspeed_extra_args.{key}.*set from other keys"):
            config.deepspeed_dict(1)


def test_batch_sizes_must_fit(flat):
    config = Config.from_flat({**flat, "train_batch_size": 5})
    with pytest.raises(UserError, match="train_batch_size 5 is not a multiple"):
        config.deepspeed_dict(1)


def test_deepspeed_reads_it(flat, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    keys = {"fp16": {"enabled": True}, "fp32_allreduce": True, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    read = DeepSpeedConfig(Config.from_flat({**flat, **keys}).deepspeed_dict(1))
    assert read.train_batch_size == 2
    assert read.float16_config.enabled
    assert read.zero_config.stage == 1
    assert read.gradient_clipping == 1.0
