"""The self-check, with the CPU in place of a GPU: it checks Triton's interpreter or stubs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from kerple.attention import (
    Attention,
    AttentionCall,
    ExpectedCalls,
    PositionTables,
    Requirements,
    Span,
    attend,
    check_kernels,
    describe_choice,
    dispatch,
    self_check,
    startup,
)
from kerple.attention.backends.chunked import chunked_attention
from kerple.attention.backends.triton import launch
from kerple.attention.self_check import Verdict
from kerple.positional import ModelShape, build, primary_names
from tests.support.bfloat16 import interpreted_bfloat16
from tests.support.self_check import install_kernels, use_cpu_as_gpu

CPU = torch.device("cpu")
SHAPE = ModelShape(num_heads=2, head_size=16, hidden_size=32, num_layers=1, max_positions=64)
EXPECTED = ExpectedCalls(
    method=None, heads=2, kv_heads=2, head_size=16, device=CPU, dtype=torch.float32, training=True
)


@pytest.fixture(autouse=True)
def cpu_as_gpu(monkeypatch):
    use_cpu_as_gpu(monkeypatch)


class TripledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def chunked_with(call: AttentionCall, **changes: object) -> torch.Tensor:
    return chunked_attention(replace(call, **changes))


# What a broken kernel might compute, and the message.
BROKEN = {
    "result": (
        lambda call: chunked_attention(call) * 1.01,
        "the result has a relative error of 1.0e-02",
    ),
    "nan": (
        lambda call: chunked_attention(call) * float("nan"),
        "the result has a relative error of nan",
    ),
    "table": (
        lambda call: chunked_with(
            call, tables=replace(call.tables, bias=call.tables.bias.roll(1, dims=1))
        ),
        "the result has a relative error",
    ),
    "key": (
        lambda call: chunked_with(call, key=TripledGradient.apply(call.key)),
        "the gradient of key has a relative error of 2.0e+00",
    ),
    "no gradient": (
        lambda call: chunked_with(call, value=call.value.detach()),
        "RuntimeError: fused computes no gradient of value",
    ),
}


@pytest.fixture
def kernels(monkeypatch):
    """Returns `install_kernels`."""
    return partial(install_kernels, monkeypatch)


def expected_calls(method: str, **others: object) -> ExpectedCalls:
    return replace(EXPECTED, method=build(method, SHAPE), **others)


def check(
    method: str = "kerple_log", backend: str = "auto", *, training: bool = True
) -> list[Verdict]:
    return check_kernels(expected_calls(method, training=training), backend)


def random_call(backend: str = "auto") -> torch.Tensor:
    """kerple_log for 8 of 10 positions, called as users do."""
    torch.manual_seed(0)
    method = build("kerple_log", SHAPE)
    states = torch.randn(1, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    return Attention(method, backend)(states[:, :, 2:], states, states)


@pytest.mark.parametrize("method", ["none", "kerple_log", "rpe", "forgetting"])
@pytest.mark.quick(2)
def test_the_kernels_pass(method):
    """The interpreter passes with tables, with jacobians, with one that is valid only from some
    distance on, and with a decay.
    """
    verdicts = check(method, "fused") + check(method, "fused", training=False)
    assert [verdict.failure for verdict in verdicts] == [
        None
    ] * 4  # windows and other lengths are other verdicts
    assert ["not multiples of 16" in str(verdict) for verdict in verdicts] == [
        False,
        True,
        False,
        True,
    ]
    gradients = {"query", "key", "value"} | (
        {"bias_coefficients"} if method == "kerple_log" else set()
    )
    gradients |= {"decay_sums"} if method == "forgetting" else set()
    assert {"result", *gradients} <= set(verdicts[0].errors)
    assert set(verdicts[-1].errors) == {"result"}
    assert str(verdicts[0]).startswith("self-check of the fused attention kernels passed (cpu, ")


@pytest.mark.parametrize("method", primary_names())
def test_every_method_has_a_backend_for_documents(method, monkeypatch):
    monkeypatch.setattr(startup, "check_fused", lambda *_: None)
    assert check_kernels(expected_calls(method, documents=True)) == []


def test_the_kernels_pass_with_documents_grouped_queries_and_windows():
    expected = expected_calls("kerple_power_ap_ap", kv_heads=1, documents=True, windowed=True)
    verdicts = check_kernels(expected, "fused")
    assert [verdict.failure for verdict in verdicts] == [None, None]
    assert "weight, grouped, documents, gradients" in str(verdicts[0])
    assert "weight, window, grouped, documents, gradients" in str(verdicts[1])


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("alibi", torch.float16),
        ("kerple_power_ap_ap", torch.bfloat16),
        ("forgetting", torch.bfloat16),
    ],
)
def test_half_precision_is_far_from_the_limits(method, dtype):
    torch.manual_seed(0)
    with interpreted_bfloat16():
        (verdict,) = check_kernels(expected_calls(method, dtype=dtype), "fused")
    assert max(verdict.errors.values()) < self_check.MAX_ERROR[dtype] / 3


def test_broken_kernels_of_the_interpreter_fail(monkeypatch):
    monkeypatch.setattr(launch, "LOG2_E", 1.44)  # 0.2 % too small
    (verdict,) = check(backend="fused")
    assert verdict.failure.startswith("the result has a relative error of")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_fail(name, kernels):
    run, message = BROKEN[name]
    kernels(run)
    (verdict,) = check("alibi")
    assert verdict.failure.startswith(message)


def test_wrong_gradients_of_coefficients_fail(kernels):
    """The error is found in a backend that uses the jacobian instead of the gradient
    of the table.
    """

    def run(call: AttentionCall) -> torch.Tensor:
        jacobian = call.tables.bias_jacobian
        steps = 1.1 * (jacobian.coefficients - jacobian.coefficients.detach())
        table = call.tables.bias.detach() + (steps[..., None] * jacobian.directions).sum(dim=1)
        return chunked_with(call, tables=replace(call.tables, bias=table))

    kernels(run)
    (verdict,) = check("kerple_log")
    assert verdict.failure.startswith("the gradient of bias coefficients has a relative error of")


def test_auto_uses_another_backend_after_a_failure(kernels, capsys):
    calls = kernels(BROKEN["result"][0])
    result = random_call()
    assert torch.equal(result, random_call("chunked"))
    assert calls == [self_check.Q_LEN - self_check.ODD]  # the 10 keys are not a multiple of 16
    (message,) = capsys.readouterr().err.splitlines()
    assert (
        "FAILED (cpu, float32, head size 16, bias, gradients, lengths that are not multiples of 16)"
        in message
    )
    assert "1.0e-02" in message
    assert "python -m kerple.doctor" in message
    random_call()
    assert len(calls) == 1
    assert capsys.readouterr().err == ""
    choice = describe_choice(expected_calls("kerple_log"))
    assert choice == "chunked (auto: the fused kernels failed their self-check)"


def test_a_configured_backend_fails(kernels):
    calls = kernels(BROKEN["result"][0])
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"'fused'.*self-check.*kerple\.doctor"):
            random_call("fused")
    assert len(calls) == 1


def test_a_failure_excludes_its_dtype_and_head_size(kernels):
    kernels(BROKEN["result"][0])
    check()
    float32 = Requirements(dtype=torch.float32, head_size=16, device=CPU)
    assert self_check.failure(float32) is not None
    assert self_check.failure(replace(float32, dtype=None)) is not None
    assert self_check.failure(replace(float32, dtype=torch.bfloat16)) is None
    assert self_check.failure(replace(float32, head_size=32)) is None
    assert self_check.failure(replace(float32, device=None)) is None


def test_the_first_call_checks(kernels, capsys):
    """`attend`, which knows no method, also checks: without gradients and in inference mode; tables
    may be short.
    """
    calls = kernels(chunked_attention)
    states = torch.randn(1, 2, 10, 16)
    bias = torch.zeros(2, 10, requires_grad=True)
    with torch.inference_mode():
        for _ in range(2):
            attend(states, states, states, bias_table=bias)
    assert calls == [self_check.Q_LEN - self_check.ODD, 10, 10]
    assert capsys.readouterr().err == ""


def test_gradients_and_windows_are_checked_on_their_own(kernels):
    assert kernels(chunked_attention) is not None
    states, tables = torch.randn(1, 2, 30, 16), PositionTables(bias=torch.zeros(2, 30))

    def verdict(**changes: object) -> Verdict | None:
        call = AttentionCall(query=states, key=states, value=states, scale=0.25, tables=tables)
        call = replace(call, **changes)
        return self_check.ensure_checked(
            call, dispatch.BACKENDS["fused"], dispatch.BACKENDS["chunked"]
        )

    assert verdict(query=states.clone().requires_grad_()) is not None
    assert verdict() is None  # the same forward kernel
    assert verdict(span=Span(window=30)) is None
    assert verdict(span=Span(window=3)) is not None
    assert verdict(tables=PositionTables()) is not None
    assert (
        verdict(query=states[:, :, :16], key=states[:, :, :16], value=states[:, :, :16]) is not None
    )
    assert verdict(key=states[:, :1], value=states[:, :1]) is not None


def test_nothing_is_checked_without_values_or_while_compiling(kernels, monkeypatch):
    calls = kernels(lambda call: torch.zeros_like(call.query))
    with FakeTensorMode():
        random_call("fused")
    assert calls == [8]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    random_call("fused")
    assert calls == [8, 8]


def test_a_choice_without_a_check_is_not_remembered(kernels, monkeypatch):
    """Such as one while a CUDA graph is captured: the next call of the kind checks."""
    calls = kernels(BROKEN["result"][0])
    method, states = build("kerple_log", SHAPE), torch.randn(3, 1, 2, 10, 16).unbind()
    attention = Attention(method)
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "can_check", lambda query: False)
        attention(*states)
    assert calls == [10]
    assert torch.equal(attention(*states), Attention(method, "chunked")(*states))


def test_other_backends_and_devices_are_not_checked(kernels, monkeypatch):
    kernels(chunked_attention)
    assert check(backend="chunked") == []
    assert check("dape_kerple") == []
    assert check("none") == []  # sdpa
    assert len(check("none", training=False)) == 4
    monkeypatch.setattr(self_check, "DEVICE_TYPE", "cuda")
    assert check("alibi") == []


def test_an_unusable_gpu_is_an_error(kernels, monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(self_check, "_gpu_error", lambda device: error)
    kernels(BROKEN["no gradient"][0])
    with pytest.raises(RuntimeError, match=r"can no longer use the GPU\..*chunked") as caught:
        check("alibi")
    assert caught.value.__cause__ is error
