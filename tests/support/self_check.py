"""The self-check with the CPU in place of a GPU."""

from collections.abc import Callable

import pytest
from torch import Tensor

from kerple.attention import AttentionCall, dispatch, self_check
from kerple.attention.backend import Backend


def use_cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a new one that checks the CPU like a GPU, with a small example; `auto` uses
    the fused kernels on the CPU.
    """
    sizes = {"BATCH": 1, "Q_LEN": 16, "KV_LEN": 48, "WINDOW": 12}
    for name, value in {"DEVICE_TYPE": "cpu", "_passed": set(), "_failures": {}, **sizes}.items():
        monkeypatch.setattr(self_check, name, value)
    monkeypatch.setattr(
        dispatch,
        "fused_is_fastest",
        lambda requirements, q_len: dispatch.unsupported_reason("fused", requirements) is None,
    )


def install_kernels(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[AttentionCall], Tensor]
) -> list[int]:
    """Replace the fused kernels with a function. Returns a list to which each call appends its
    number of queries.
    """
    calls: list[int] = []

    def counted(call: AttentionCall) -> Tensor:
        calls.append(call.q_len)
        return run(call)

    monkeypatch.setitem(dispatch.BACKENDS, "fused", Backend("fused", counted, dropout=False))
    return calls
