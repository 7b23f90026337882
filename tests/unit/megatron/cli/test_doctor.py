"""The doctor's checks of the loss and block kernels, in Triton's interpreter."""

import pytest
import torch

from kerple.doctor import print_table
from megatron.cli import doctor
from megatron.cli.doctor import BLOCKS, check_model_kernels
from megatron.model import fused_block, loss

CPU = torch.device("cpu")


@pytest.fixture
def kernels(monkeypatch) -> None:
    pytest.importorskip("triton")
    for module in (fused_block, loss):
        monkeypatch.setattr(module, "KERNEL_DEVICES", ["cpu"])


@pytest.mark.ci
def test_correct_kernels(kernels, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "DTYPES", (torch.float32,))
    rows = check_model_kernels(CPU)
    assert [row[0].method for row in rows] == ["loss", *BLOCKS]
    assert [check.failure for row in rows for check in row] == [None] * 3
    print_table(rows)
    assert capsys.readouterr().out.count("fused passed") == 3


@pytest.mark.ci
def test_kernels_that_fail(kernels, monkeypatch, capsys):
    for module, function in ((loss, "_launch"), (fused_block, "_GatedLinear")):
        monkeypatch.setattr(module, function, lambda *_, **__: 1 / 0)
    monkeypatch.setattr(doctor, "DTYPES", (torch.float32,))
    rows = check_model_kernels(CPU)
    assert {check.method for row in rows for check in row if check.failure} == {
        "loss",
        [*BLOCKS][1],
    }
    print_table(rows)
    assert capsys.readouterr().out.count("FAILED") == 2


def test_a_device_that_does_not_use_them():
    assert check_model_kernels(CPU) == []
