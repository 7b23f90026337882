"""The doctor: its output without a GPU, and its checks of a GPU, with the CPU in its place."""

import json
import math
import os
from dataclasses import replace

import pytest
import torch

from kerple import doctor
from kerple.attention import self_check
from kerple.attention.backends.chunked import chunked_attention
from tests.support.self_check import install_kernels, use_cpu_as_gpu

CPU = torch.device("cpu")
METHODS = ("none", "kerple_log", "kerple_power__ap", "dape_v2_kerple")


@pytest.fixture(autouse=True)
def few_methods(monkeypatch):
    monkeypatch.setattr(doctor, "primary_names", lambda: METHODS)


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Returns a function that makes the CPU look like a GPU with the given fused kernels. It
    returns their calls.
    """

    def install(run) -> list[int]:
        use_cpu_as_gpu(monkeypatch)
        monkeypatch.setattr(self_check, "device_name", lambda device: "NVIDIA Test")
        return install_kernels(monkeypatch, run)

    return install


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    path = tmp_path / "doctor.json"
    assert doctor.main(["--json", str(path), "--head-size", "16"]) == 0
    output = capsys.readouterr().out
    assert f"PyTorch version: {torch.__version__}" in output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.split()[:1]}
    assert rows["method"] == ["float32", "float16", "bfloat16"]
    assert rows["kerple_log"][::2] == ["chunked+sdpa"] * 3
    assert rows["dape_v2_kerple"][::2] == ["chunked"] * 3
    assert "all 12 checks passed" in output
    assert "secret-token" not in output + path.read_text()
    assert os.environ["HOME"] not in output
    result = json.loads(path.read_text())
    assert result["passed"] is True
    assert len(result["checks"]) == 12
    assert torch.__version__ in result["machine"]


@pytest.mark.parametrize(
    "options", [["--head-size", "63"], ["--head-size", "0"], ["--json", "missing/doctor.json"]]
)
def test_wrong_options(options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        doctor.main(options)
    assert caught.value.code == 2
    assert f"error: {options[0]}: " in capsys.readouterr().err


def test_a_gpu_whose_kernels_work(cpu_as_gpu):
    calls = cpu_as_gpu(chunked_attention)
    check = doctor.check_method("kerple_log", CPU, torch.bfloat16, 16)
    assert (check.device, check.backends, check.failure, check.unsupported) == (
        "NVIDIA Test",
        ["fused"],
        None,
        None,
    )
    assert {"result", "query", "bias_coefficients"} <= set(check.errors)
    # Training; evaluation with and without a window, for two kinds of lengths; each with grouped
    # queries and without.
    assert len(calls) == 10
    # Another check of the process runs the kernels again.
    doctor.check_method("kerple_log", CPU, torch.bfloat16, 16)
    assert len(calls) == 20


def test_a_gpu_whose_kernels_are_wrong(cpu_as_gpu, capsys):
    """A failure of one method does not prevent the checks of the others."""

    def run(call):
        if call.query.dtype == torch.float16:
            raise RuntimeError("PassManager::run failed\nmore")
        return chunked_attention(call) * (2 if call.tables.weight is not None else 1)

    cpu_as_gpu(run)
    assert doctor.main(["--head-size", "16"]) == 1
    output = capsys.readouterr().out
    rows = {line.split()[0]: line for line in output.splitlines() if line.split()[:1]}
    assert rows["kerple_log"].count("FAILED") == 1
    assert rows["kerple_power__ap"].count("FAILED") == 3
    assert rows["dape_v2_kerple"].count("FAILED") == 0
    assert "RuntimeError: PassManager::run failed\n" in output
    assert "the result has a relative error of 1.0e+00" in output
    assert "5 of 12 checks FAILED" in output


def test_a_gpu_whose_kernels_are_wrong_for_grouped_queries(cpu_as_gpu):
    """Query head i uses key/value head i // 2, not i % 2."""

    def run(call):
        repeats = (1, call.queries_per_kv, 1, 1)
        return chunked_attention(
            replace(call, key=call.key.repeat(repeats), value=call.value.repeat(repeats))
        )

    cpu_as_gpu(run)
    check = doctor.check_method("kerple_log", CPU, torch.bfloat16, 16)
    assert check.failure.startswith("the result has a relative error of ")
    assert check.failure.endswith(" (grouped queries)")


def test_one_gpu_of_each_kind_is_checked(monkeypatch):
    names = ["NVIDIA H100", "NVIDIA A100", "NVIDIA H100"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    assert doctor._devices() == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_decays_are_checked(monkeypatch):
    calls = []
    monkeypatch.setattr(
        doctor, "relative_errors", lambda call, *_, **__: calls.append(call) or {"result": 0.0}
    )
    doctor.check_method("forgetting", CPU, torch.float32, 64)
    assert calls
    assert all(call.decay_sums.diff().abs().max() > 0 for call in calls)


def test_float32_is_checked_without_tf32(monkeypatch):
    allowed = []

    def record(*_, **__):
        allowed.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return {"result": 0.0}

    monkeypatch.setattr(doctor, "relative_errors", record)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    doctor.check_method("dape_v2", torch.device("cpu"), torch.float32, 64)
    assert set(allowed) == {(False, False)}
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("name", "tensor", "error", "in_float64", "fails"),
    [
        (
            "dape",
            "query",
            1e-3,
            1e-12,
            False,
        ),  # as measured where rounding moves a hidden unit across the kink
        ("dape", "query", 1e-3, 1e-3, True),  # not due to rounding
        ("dape", "key", 5e-3, 1e-12, True),
        ("dape", "result", 1e-3, 1e-12, True),  # the result has no jump
        ("kerple_log", "query", 1e-3, 1e-12, True),
        ("kerple_log", "result", math.nan, 1e-12, True),
    ],
)
def test_jumps_of_gradients_at_kinks_are_no_failure(
    name, tensor, error, in_float64, fails, monkeypatch
):
    def relative_errors(call, *arguments, **options):
        found = in_float64 if call.query.dtype == torch.float64 else error
        return {"result": 1e-7, "query": 1e-7, "key": 1e-7, tensor: found}

    monkeypatch.setattr(doctor, "relative_errors", relative_errors)
    failure = doctor.check_method(name, CPU, torch.float32, 16).failure
    assert (failure is not None) == fails, failure
