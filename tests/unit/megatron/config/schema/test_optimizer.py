import pytest

from megatron.config import Config
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
        (
            {
                "bf16": {"enabled": True},
                "fp16": {"enabled": True, "type": "bf16"},
                "precision": "bfloat16",
            },
            "bf16",
        ),
        ({"fp16": None}, "fp32"),
    ],
)
def test_precision(flat, keys, dtype):
    assert Config.from_flat({**flat, **keys}).precision.dtype == dtype


def test_contradictory_precision(flat):
    for keys in (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {"precision": "fp32", "bf16": {"enabled": True}},
        {"precision": "fp16", "fp16": {"enabled": True, "type": "bfloat16"}},
    ):
        assert_rejected("contradictory precision", Config.from_flat, {**flat, **keys})


def test_optimizers_of_zero_are_rejected(flat):
    for key, value in (
        ("cpu_offload", True),
        ("cpu_offload", 1),
        ("offload_optimizer", {"device": "cpu"}),
        ("zenflow", {"topk_ratio": 0.1}),
    ):
        keys = {**flat, "zero_optimization": {"stage": 2, key: value}}
        assert_rejected(rf"zero_optimization\.{key} is not supported", Config.from_flat, keys)
