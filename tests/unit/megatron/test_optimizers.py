"""The optimizer registry."""

import sys
from typing import get_args

import pytest
import torch

from megatron.optimizers import (
    OPTIMIZERS,
    OptimizerParams,
    OptimizerType,
    build_optimizer,
    get_step,
    initialize_state,
    set_step,
)
from megatron.utils.errors import UserError


def test_the_registry_defines_every_optimizer_type():
    assert set(get_args(OptimizerType)) == set(OPTIMIZERS)
    for spec in OPTIMIZERS.values():
        assert set(spec.defaults) == set(OptimizerParams.__annotations__)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_registry_lists_the_state_tensors_and_their_shape(name):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer, _ = build_optimizer(name, [{"params": [weight]}], {})
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = dict(optimizer.state[weight])
    state.pop("step")
    assert tuple(state) == OPTIMIZERS[name].state_tensors
    assert all(tensor.shape == weight.shape for tensor in state.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_restored_state_continues_like_an_uninterrupted_run(name, decoupled):
    params = {"lr": 0.1, "adam_w_mode": decoupled}

    def new():
        weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
        return weight, build_optimizer(name, [{"params": [weight], "weight_decay": 0.1}], params)[0]

    def step(weight, optimizer):
        weight.grad = weight.detach().cos()
        optimizer.step()

    weight, optimizer = new()
    step(weight, optimizer)
    resumed, fresh = new()
    resumed.data.copy_(weight.data)
    state = initialize_state(fresh, resumed, OPTIMIZERS[name].state_tensors)
    for key in OPTIMIZERS[name].state_tensors:
        state[key].copy_(optimizer.state[weight][key])
    assert get_step(fresh, fresh.param_groups[0], resumed) == 0
    set_step(fresh, fresh.param_groups[0], resumed, get_step(optimizer, optimizer.param_groups[0], weight))
    step(weight, optimizer)
    step(resumed, fresh)
    assert torch.equal(weight, resumed)
    assert get_step(fresh, fresh.param_groups[0], resumed) == 2


def test_adam_w_mode_selects_decoupled_weight_decay():
    def updated(decoupled):
        weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
        optimizer, description = build_optimizer(
            "adam", [{"params": [weight], "weight_decay": 0.5}], {"lr": 0.1, "adam_w_mode": decoupled}
        )
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight[0, 0].item(), description

    # Decoupled: w (1 - lr wd) - lr. L2: the first step of Adam is -lr whatever the size of the gradient.
    assert updated(True) == (pytest.approx(3.0 * 0.95 - 0.1, abs=1e-5), "torch AdamW, fused")
    assert updated(False) == (pytest.approx(2.9, abs=1e-5), "torch Adam, fused")


def test_apex_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    monkeypatch.setitem(sys.modules, "apex.optimizers", None)
    with pytest.raises(UserError, match=r"optimizer\.params\.apex: NVIDIA apex is not installed"):
        build_optimizer("adam", [{"params": [torch.nn.Parameter(torch.ones(1))]}], {"apex": True})
