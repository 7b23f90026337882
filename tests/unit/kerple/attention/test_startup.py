"""Which backend will run, and why. test_self_check.py tests the check of the kernels."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from kerple.attention import ExpectedCalls, describe_choice, dispatch
from kerple.attention.backends.triton import launch
from kerple.positional import ModelShape, build

SHAPE = ModelShape(num_heads=2, head_size=4, hidden_size=8, num_layers=1, max_positions=16)


@pytest.fixture
def fused_available(monkeypatch):
    """Act as if Triton could run everywhere."""
    monkeypatch.setattr(launch, "_load_kernels", lambda: ModuleType("kernels"))
    available = replace(dispatch.BACKENDS["fused"], unavailable_reason=lambda requirements: None)
    monkeypatch.setitem(dispatch.BACKENDS, "fused", available)


def expected_calls(name, device, **options):
    method = name and build(name, SHAPE)
    states = {"heads": 2, "kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return ExpectedCalls(method=method, device=torch.device(device), **states, **options)


def choice(name, device, **options):
    return describe_choice(expected_calls(name, device, **options))


def test_the_choice_is_described(fused_available):
    """As the log prints it."""
    assert choice("rotary", "cpu").startswith("sdpa, and chunked for windows")
    assert choice("rotary", "cuda").startswith("sdpa, and fused for windows")
    assert choice("rotary", "cuda", windowed=True).startswith("fused (auto")
    assert choice("rotary", "cpu", windowed=True).startswith("chunked (auto")
    assert choice("rotary", "cuda", documents=True).startswith("fused (auto")
    assert choice("rotary", "cpu", documents=True).startswith("sdpa (auto")
    assert choice("kerple_log", "cuda").startswith("fused (auto")
    assert choice("kerple_log", "cpu").startswith("chunked (auto")
    assert choice("kerple_log", "cpu", documents=True).startswith("chunked (auto")
    assert choice("xpos", "cuda", documents=True).startswith("sdpa (auto")
    assert choice("dape", "cuda").startswith("chunked (auto")
    assert describe_choice(expected_calls(None, "cpu"), "reference") == "reference (as configured)"


def test_without_triton_auto_chooses_other_backends_on_a_gpu(monkeypatch):
    monkeypatch.setattr(launch, "_load_kernels", lambda: None)
    backends = {
        ("alibi", False): "chunked",
        ("forgetting", False): "sdpa",
        ("rotary", True): "sdpa",
    }
    for (name, windowed), backend in backends.items():
        expected = f"{backend} (auto: fused needs Triton, which is not installed)"
        assert choice(name, "cuda", windowed=windowed) == expected
    for name, documents in ((None, False), ("xpos", True)):
        described = choice(name, "cuda", documents=documents)
        assert described.startswith("sdpa")
        assert described.endswith("(auto: fastest on cuda for this method)")
