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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "contradictory precision"),
        ({"precision": "fp32", "bf16": {"enabled": True}}, "contradictory precision"),
        (
            {"precision": "fp16", "fp16": {"enabled": True, "type": "bfloat16"}},
            "contradictory precision",
        ),
        *(
            (
                {"zero_optimization": {"stage": 2, key: value}},
                rf"zero_optimization\.{key} is not supported",
            )
            for key, value in (
                ("cpu_offload", True),
                ("cpu_offload", 1),
                ("offload_optimizer", {"device": "cpu"}),
                ("zenflow", {"topk_ratio": 0.1}),
            )
        ),
    ],
)
def test_rejected_precisions_and_optimizers_of_zero(flat, keys, message):
    assert_rejected(message, Config.from_flat, {**flat, **keys})
