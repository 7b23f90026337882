"""The self-check and the doctor on a simulated CUDA device: no tensor is on the wrong device.
Simulated tensors have no values, so nothing is compared.
"""

from dataclasses import replace

import pytest
import torch

from kerple import doctor
from kerple.attention import ExpectedCalls, check_kernels, dispatch, self_check
from kerple.attention.self_check import relative_errors, small_call
from kerple.positional import ModelShape, build
from tests.support.simulated_cuda import SimulatedCuda, move_to_cuda

SHAPE = ModelShape(num_heads=4, head_size=64, hidden_size=256, num_layers=1, max_positions=512)
SIZES = {"heads": 4, "kv_heads": 4, "head_size": 64, "device": torch.device("cuda")}


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("rpe", torch.float32),
        pytest.param("kerple_power_ap_ap", torch.bfloat16, marks=pytest.mark.ci),
        pytest.param("forgetting", torch.float32, marks=pytest.mark.ci),
    ],
)
def test_the_comparison(method, dtype, monkeypatch):
    """Training; and fewer queries than keys, with and without a window, for two kinds
    of lengths.
    """
    calls = []
    monkeypatch.setattr(self_check, "ensure_checked", lambda call, *_, **__: calls.append(call))
    with SimulatedCuda() as device:
        positional = move_to_cuda(build(method, SHAPE), None)
        for training in (True, False):
            check_kernels(ExpectedCalls(method=positional, dtype=dtype, training=training, **SIZES))
        assert [call.span.window is None for call in calls] == [True, True, True, False, False]
        for call, gradients in zip(calls, (True, False, False, False, False), strict=True):
            device.reset()
            call = small_call(replace(call, query=call.query.detach()))
            errors = relative_errors(
                call, dispatch.BACKENDS["fused"], dispatch.BACKENDS["chunked"], gradients=gradients
            )
            assert (
                set(errors) >= {"result", "query", "key", "value"}
                if gradients
                else set(errors) == {"result"}
            )
            assert device.kernels["triton.forward_kernel"] == 1
            assert device.kernels["triton.query_kernel"] == gradients


def test_simulated_tensors_are_not_checked():
    with SimulatedCuda() as device:
        method = move_to_cuda(build("kerple_log", SHAPE), None)
        expected = ExpectedCalls(method=method, dtype=torch.bfloat16, training=True, **SIZES)
        verdicts = check_kernels(expected, "fused")
        assert verdicts == []
        assert device.kernels["triton.forward_kernel"] == 0


def test_the_doctor_checks_methods_that_fused_does_not_support(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: move_to_cuda(module, None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Simulated")
    with SimulatedCuda():
        check = doctor.check_method("fire", torch.device("cuda"), torch.bfloat16, 64)
    assert check.backends == ["chunked"]
    assert "modify_scores" in check.unsupported
    assert set(check.errors) == {"result", "query", "key", "value"}
