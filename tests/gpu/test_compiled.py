"""torch.compile on a simulated CUDA device. Graphs run operator by operator, without Inductor, which would compile
kernels for a GPU; tests/unit/megatron/model/test_compiled.py runs it on the CPU.
"""

import pytest
import torch

from kerple.attention.backends import flex
from megatron.model import compiled
from megatron.model.compiled import compile_blocks, is_traceable
from megatron.model.gpt import TransformerBlock
from tests.gpu.test_methods import check_training, cuda_model, settings_for, slow_unless
from tests.support.simulated_cuda import SimulatedCuda

CUDA = torch.device("cuda")
KINDS = ("none", "learned", "rotary", "xpos", "alibi", "kerple_log", "kerple_power_ap_ap", "rpe", "fire", "dape_kerple")
GRAPH_BREAKS = ("rotary", "xpos", "fire", "dape_kerple")


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=slow_unless(name in ("kerple_log", "xpos"))) for name in KINDS],
)
def test_compiled_blocks(method, monkeypatch):
    """Forward and backward pass of a step; the block is one graph unless the positional method cannot be traced."""
    torch._dynamo.reset()
    whole = method not in GRAPH_BREAKS
    run = torch.compile(TransformerBlock.forward, dynamic=False, fullgraph=whole, backend="aot_eager")
    monkeypatch.setattr(compiled._CompiledBlock, "_compiled", run)
    monkeypatch.setattr(torch, "compile", lambda function: function)  # the check of the compiler itself
    with SimulatedCuda() as device:
        model = cuda_model(settings_for(method))
        assert compile_blocks(model, CUDA) == whole
        check_training(model, device)
        assert device.kernels["triton.norm_kernel"] == 0


def test_attention_with_dropout_is_not_traced():
    with SimulatedCuda():
        layer = cuda_model(settings_for("kerple_log", "auto", "attention-dropout=0.1")).blocks[0].attention
        assert not is_traceable(layer, CUDA)


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        *(pytest.param(name, (), marks=pytest.mark.slow) for name in ("none", "rotary", "kerple_power_ap_ap")),
        ("kerple_log", ("num_kv_heads=3", "sliding_window_width=128")),
    ],
)
def test_flex(method, overrides, monkeypatch):
    """FlexAttention's forward and backward operators, which Inductor would replace with its kernels."""
    torch._dynamo.reset()
    flex._block_mask.cache_clear()
    run = torch.compile(flex._flex_module().flex_attention, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: run)
    with SimulatedCuda() as device:
        check_training(cuda_model(settings_for(method, "flex", *overrides)), device)
        assert device.kernels["flex_attention"] == device.kernels["flex_attention_backward"] == 2
    flex._block_mask.cache_clear()
