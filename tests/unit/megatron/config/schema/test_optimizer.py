import pytest

from megatron.config import Config, UserError


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({}, "fp32"),
        ({"precision": "fp32"}, "fp32"),
        ({"precision": "bfloat16"}, "bf16"),
        ({"fp16": {"enabled": False, "type": "bfloat16"}}, "fp32"),
        ({"fp16": {"enabled": True, "type": "bfloat16"}}, "bf16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True, "type": "bf16"}, "precision": "bfloat16"}, "bf16"),
        ({"fp16": None}, "fp32"),
    ],
)
def test_precision(flat, keys, dtype):
    assert Config.from_flat({**flat, **keys}).precision.dtype == dtype


@pytest.mark.parametrize(
    "keys",
    [
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "fp32", "bf16": {"enabled": True}},
        {"precision": "fp16", "fp16": {"enabled": True, "type": "bfloat16"}},
    ],
)
def test_contradictory_precision(flat, keys):
    with pytest.raises(UserError, match="contradictory precision"):
        Config.from_flat({**flat, **keys})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reduce_bucket_size", 0, "must be .* 1, not 0"),
        ("overlap_comm", 1, "must be true or false, not 1"),
        ("offload_param", {"device": "gpu"}, "device"),
        ("cpu_offload", True, "cpu_offload"),
        ("offload_optimizer", {"device": "cpu"}, "cpu_offload"),
    ],
)
def test_values_of_zero_keys_are_checked(flat, key, value, message):
    with pytest.raises(UserError, match=message) as caught:
        Config.from_flat({**flat, "zero_optimization": {"stage": 2, key: value}})
    assert key in str(caught.value)
