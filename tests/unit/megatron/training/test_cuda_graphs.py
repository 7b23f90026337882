"""The capture of a training step, without a GPU; `tests/gpu/test_engine.py` captures on a simulated one."""

import pytest
import torch

from megatron.config import Config, UserError
from megatron.training.cuda_graphs import capture
from megatron.training.engine import GPTWithLoss
from megatron.training.loop import train
from tests.support.language_models import small_gpt
from tests.support.runs import training_settings


def test_the_graphed_loss_replaces_forward(monkeypatch):
    """It is captured with copies of the batch, without the model's hooks, and draws no random numbers."""
    model = small_gpt("kerple_log")
    model.__class__ = GPTWithLoss
    model.register_forward_pre_hook(lambda *_: pytest.fail("DeepSpeed's hook"))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    captured = []

    def graph(module, inputs):
        torch.rand(3)
        captured.append(module(*inputs))
        assert all(copy is not tokens for copy in inputs)
        module.forward = lambda *inputs: captured[0]
        return module

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", graph)
    expected, state = model.loss(tokens, tokens), torch.get_rng_state()
    capture(model, [tokens, tokens])
    assert torch.equal(torch.get_rng_state(), state)
    assert model.forward(tokens, tokens) is captured[0]
    assert torch.equal(captured[0], expected)
    assert not any("forward" in name for name in model.state_dict())


def test_a_gpu_is_required(tmp_path, data_path):
    keys = {"enable_cuda_graph": True, "precision": "bfloat16"}
    with pytest.raises(UserError, match=r"enable_cuda_graph.*GPU"):
        train(Config.from_flat(training_settings(tmp_path, data_path, **keys)))
