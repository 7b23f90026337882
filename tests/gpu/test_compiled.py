"""torch.compile on a simulated CUDA device. Graphs run operator by operator, without Inductor, which would compile
kernels for a GPU; tests/unit/megatron/model/test_compiled.py runs it on the CPU.
"""

import pytest
import torch

from kerple.attention.backends import flex
from megatron.model import compiled
from megatron.model.compiled import compile_blocks, is_traceable
from megatron.model.gpt import TransformerBlock
from tests.gpu.test_methods import check_training, cuda_model, settings_for
from tests.support.simulated_cuda import SimulatedCuda

CUDA = torch.device("cuda")


@pytest.mark.ci
@pytest.mark.parametrize(("method", "whole"), [("kerple_log", True), ("xpos", False)])
def test_compiled_blocks(method, whole, monkeypatch):
    """Forward and backward pass of a step; the block is one graph unless the positional method cannot be traced."""
    torch._dynamo.reset()
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


@pytest.mark.ci
def test_flex(monkeypatch):
    """FlexAttention's forward and backward operators, which Inductor would replace with its kernels."""
    torch._dynamo.reset()
    flex._block_mask.cache_clear()
    run = torch.compile(flex._flex_module().flex_attention, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: run)
    with SimulatedCuda() as device:
        settings = settings_for("kerple_log", "flex", "num_kv_heads=3", "sliding_window_width=128")
        check_training(cuda_model(settings), device)
        assert device.kernels["flex_attention"] == device.kernels["flex_attention_backward"] == 2
    flex._block_mask.cache_clear()
