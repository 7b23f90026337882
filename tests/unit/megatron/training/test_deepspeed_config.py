"""DeepSpeed's configuration: derived from ours, and accepted by DeepSpeed's own reader."""

import pytest

from megatron.config import Config, UserError
from megatron.training.deepspeed_config import deepspeed_dict

KEYS = {
    "num-layers": 2,
    "hidden-size": 32,
    "num-attention-heads": 4,
    "seq-length": 16,
    "pos-emb": "kerple_log",
    "train_micro_batch_size_per_gpu": 2,
}


def convert(ranks: int = 1, **keys) -> dict:
    return deepspeed_dict(Config.from_flat({**KEYS, **keys}), ranks)


def test_fp32():
    settings = convert(ranks=4, gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert settings["train_batch_size"] == 24
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 3
    assert settings["gradient_clipping"] == 0.5
    assert settings["zero_optimization"] == {"stage": 0}
    assert not {"optimizer", "scheduler", "fp16", "bf16", "communication_data_type"} & settings.keys()


def test_fp16_and_bf16():
    fp16 = convert(fp16={"enabled": True, "loss_scale": 128, "hysteresis": 3})
    assert fp16["fp16"]["enabled"] is True
    assert (fp16["fp16"]["loss_scale"], fp16["fp16"]["hysteresis"]) == (128, 3)
    assert "bf16" not in fp16
    bf16 = convert(fp16={"enabled": True, "type": "bfloat16"}, fp32_allreduce=True)
    assert bf16["bf16"] == {"enabled": True}
    assert bf16["communication_data_type"] == "fp32"
    assert "fp16" not in bf16


def test_zero_keys_are_passed_through():
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8, "cpu_offload": False}
    settings = convert(zero_optimization=zero)
    assert settings["zero_optimization"] == {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8}
    settings = convert(zero_optimization={**zero, "cpu_offload": True})
    assert settings["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_extra_keys_are_passed_through():
    assert convert(deepspeed_extra_args={"comms_logger": {"enabled": True}})["comms_logger"] == {"enabled": True}


@pytest.mark.parametrize("key", ["train_batch_size", "optimizer", "fp16"])
def test_extra_keys_that_other_keys_set_are_rejected(key):
    with pytest.raises(UserError, match=rf"deepspeed_extra_args\.{key}.*set from other keys"):
        convert(deepspeed_extra_args={key: 1})


def test_inconsistent_batch_sizes_are_rejected():
    with pytest.raises(UserError, match="train_batch_size 5 is not a multiple"):
        convert(train_batch_size=5)


def test_deepspeed_accepts_the_result(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = DeepSpeedConfig(
        convert(fp16={"enabled": True}, fp32_allreduce=True, zero_optimization={"stage": 1, "overlap_comm": True})
    )
    assert config.train_batch_size == 2
    assert config.float16_config.enabled
    assert config.zero_config.stage == 1
    assert config.gradient_clipping == 1.0
