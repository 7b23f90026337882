"""Which verdict all ranks use, what is reported, and what fails. The verdicts themselves are those
of `kerple.attention.self_check` and `megatron.model.loss`.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kerple.attention import ExpectedCalls, Requirements, self_check
from kerple.attention.self_check import Verdict
from megatron.model import fused_block, kernel_check, loss
from megatron.model.kernel_check import check_kernels
from tests.support.errors import assert_rejected
from tests.support.language_models import small_gpt

DEVICE = torch.device("cuda")
PASSED = Verdict("A100", {"result": 1e-3}, None, 1.0)
FAILED = Verdict("H100", {"result": 0.5}, "the result is wrong", 1.0)


@pytest.fixture
def ranks(monkeypatch):
    """Returns a function that sets this rank's verdicts and those of another rank, and the
    arguments of its checks.
    """
    monkeypatch.setattr(self_check, "_failures", {})
    monkeypatch.setattr(loss, "KERNEL_DEVICES", ["cuda"])
    monkeypatch.setattr(fused_block, "KERNEL_DEVICES", ["cuda"])

    def install(
        own: list[Verdict],
        other: list[Verdict],
        other_loss: str | None = None,
        other_block: str | None = None,
    ) -> list[ExpectedCalls]:
        checks = []

        def check(expected, backend):
            checks.append(expected)
            return own

        monkeypatch.setattr(kernel_check, "check_attention_kernels", check)
        monkeypatch.setattr(loss, "kernel_failure", lambda device, dtype: None)
        monkeypatch.setattr(fused_block, "kernel_failure", lambda *_: None)
        monkeypatch.setattr(
            kernel_check,
            "run_on_all_ranks",
            lambda function: [function(), (other, other_loss, other_block)],
        )
        return checks

    return install


def run(model: nn.Module, *, training: bool = True) -> list[str]:
    lines: list[str] = []
    check_kernels(model, DEVICE, torch.bfloat16, training=training, report=lines.append)
    return lines


def is_rejected() -> bool:
    return (
        self_check.failure(Requirements(dtype=torch.bfloat16, head_size=8, device=DEVICE))
        is not None
    )


def test_a_verdict_is_reported_once(ranks):
    ranks([PASSED, PASSED], [PASSED])
    assert run(small_gpt("kerple_log")) == [str(PASSED)]
    ranks([], [])
    assert run(small_gpt("kerple_log")) == []
    assert not is_rejected()


@pytest.mark.parametrize(
    ("own", "other"), [([FAILED], [PASSED]), ([PASSED], [FAILED]), ([], [FAILED])]
)
def test_a_failure_on_any_rank_counts_on_all(ranks, own, other):
    ranks(own, other)
    assert run(small_gpt("kerple_log")) == [str(FAILED)]
    assert is_rejected()


def test_a_failure_of_the_loss_kernel_on_any_rank_counts_on_all(ranks):
    ranks([], [], "the gradient has a relative error of 1.0")
    (line,) = run(small_gpt("kerple_log"))
    assert line.startswith("self-check of the kernels for the loss FAILED: the gradient has")
    assert loss.KERNEL_DEVICES == []
    assert not is_rejected()


def test_the_configured_backend_fails_on_all_ranks(ranks):
    ranks([PASSED], [FAILED])
    assert_rejected(
        r"'fused'.*self-check.*H100", run, small_gpt("kerple_log", attention_backend="fused")
    )


def test_a_stage_without_blocks_takes_part(ranks):
    checks = ranks([], [FAILED])
    assert run(nn.Linear(2, 2)) == [str(FAILED)]
    assert checks == []


def test_each_kind_of_layer_is_checked(ranks):
    checks = ranks([], [])
    bias, weight = {"kerple": {"bias": "log"}}, {"kerple": {"bias": None, "weight": "power"}}
    run(small_gpt("per_layer", pos_emb_options={"methods": [bias, weight]}, num_layers=4))
    assert len(checks) == 2


@pytest.mark.parametrize(
    ("dropout", "training", "with_gradients"),
    [(0.0, True, True), (0.1, True, False), (0.0, False, False)],
)
def test_what_is_checked(ranks, dropout, training, with_gradients):
    checks = ranks([], [])
    run(small_gpt("kerple_log", attention_dropout=dropout), training=training)
    run(
        small_gpt("kerple_log", attention_dropout=dropout, num_kv_heads=2, sliding_window_width=8),
        training=training,
    )
    sizes = {"heads": 4, "kv_heads": 4, "head_size": 8, "device": DEVICE, "dtype": torch.bfloat16}
    expected = ExpectedCalls(method=None, training=with_gradients, **sizes)
    others = replace(expected, kv_heads=2, windowed=True)
    assert [replace(check, method=None) for check in checks] == [expected, others]


def test_a_rank_whose_block_kernels_fail(ranks):
    """No rank uses them."""
    ranks([], [], other_block="a result has a relative error of 1")
    (line,) = run(small_gpt("kerple_log"))
    assert (
        "transformer blocks FAILED: a result has a relative error of 1; PyTorch operations" in line
    )
    assert fused_block.KERNEL_DEVICES == []
