import pytest

from megatron.config import Config, UserError
from tests.support.errors import assert_rejected


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
    assert_rejected("contradictory precision", Config.from_flat, {**flat, **keys})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cpu_offload", True),
        ("cpu_offload", 1),
        ("offload_optimizer", {"device": "cpu"}),
        ("zenflow", {"topk_ratio": 0.1}),
    ],
)
def test_optimizers_of_zero_are_rejected(flat, key, value):
    with pytest.raises(UserError, match=rf"zero_optimization\.{key} is not supported"):
        Config.from_flat({**flat, "zero_optimization": {"stage": 2, key: value}})
