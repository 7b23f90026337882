"""The capabilities of backends."""

import pytest
import torch

from kerple.attention.backend import Backend, Requirements


@pytest.mark.parametrize(
    ("capabilities", "requirements", "reason"),
    [
        ({"noncausal": False}, {"causal": False}, "only causal"),
        ({"weight": False}, {"weight": True}, "cannot multiply scores by a weight"),
        ({}, {"modify_scores": True}, "does not support positional methods with modify_scores"),
        ({"dropout": False}, {"dropout": True}, "does not support attention dropout"),
        (
            {"value_sizes": False},
            {"head_size": 8, "value_size": 9},
            "value heads of the size of key heads, 8, not 9",
        ),
        ({"key_mask": False}, {"key_mask": True}, "does not support a key mask"),
        (
            {"dtypes": (torch.float16,)},
            {"dtype": torch.float64},
            "supports torch.float16, not torch.float64",
        ),
        ({"max_head_size": 64}, {"head_size": 65}, "supports head sizes up to 64, not 65"),
        (
            {"max_batch_heads": 4},
            {"batch_heads": 5},
            "supports up to 4 for batch size times heads, not 5",
        ),
        (
            {"training_on_cpu": False},
            {"training": True, "device": torch.device("cpu")},
            "cannot compute gradients on a CPU",
        ),
        (
            {"unavailable_reason": lambda requirements: "is broken"},
            {"device": torch.device("cpu")},
            "is broken",
        ),
    ],
)
def test_unsupported_requirements_have_a_reason(capabilities, requirements, reason):
    backend = Backend("test", lambda call: call.query, **capabilities)
    assert reason in backend.unsupported_reason(Requirements(**requirements))
    assert backend.unsupported_reason(Requirements()) is None
