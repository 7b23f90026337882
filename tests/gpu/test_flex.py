"""FlexAttention on a simulated CUDA device, operator by operator: Inductor would compile kernels
for a GPU.
"""

import pytest
import torch

from kerple.attention.backends import flex
from tests.gpu.test_methods import check_training, cuda_model, settings_for
from tests.support.simulated_cuda import SimulatedCuda


@pytest.mark.ci
def test_flex(monkeypatch):
    """FlexAttention's forward and backward operators, which Inductor would replace with its
    kernels.
    """
    torch._dynamo.reset()
    flex._block_mask.cache_clear()
    run = torch.compile(flex._flex_module().flex_attention, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: run)
    with SimulatedCuda() as device:
        settings = settings_for("kerple_log", "flex", "num_kv_heads=3", "sliding_window_width=128")
        check_training(cuda_model(settings), device)
        assert device.kernels["flex_attention"] == device.kernels["flex_attention_backward"] == 2
    flex._block_mask.cache_clear()
