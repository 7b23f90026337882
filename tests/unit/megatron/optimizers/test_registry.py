"""The optimizer registry."""

import sys
from typing import get_args

import pytest
import torch

from megatron.optimizers.registry import (
    OPTIMIZERS,
    OptimizerType,
    build_optimizer,
    get_step,
    initialize_state,
    set_step,
    state_shape,
)
from tests.support.errors import assert_rejected


def new_optimizer(name, **params):
    """A parameter of each shape that optimizers treat differently, and the optimizer; the matrix
    has weight decay.
    """
    torch.manual_seed(0)
    shapes = ((65, 64), (4,)) if name == "adam8bit" else ((3, 2), (4,))  # 8-bit from 4,096 elements
    matrix, vector = (torch.nn.Parameter(torch.randn(shape)) for shape in shapes)
    matrices = {"matrices": True} if OPTIMIZERS[name].separates_matrices else {}
    groups = [
        {"params": [matrix], "weight_decay": 0.1, **matrices},
        {"params": [vector], "weight_decay": 0.0},
    ]
    return build_optimizer(name, groups, {"lr": 0.1, **params})[0], [matrix, vector]


def step(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = parameter.detach().cos()
    optimizer.step()


def state_tensors(optimizer, parameter):
    """Without the step count, and bitsandbytes' tables from codes to numbers."""
    constant = ("step", "qmap1", "qmap2")
    return {
        kind: tensor for kind, tensor in optimizer.state[parameter].items() if kind not in constant
    }


PARAMS = [(name, {}) for name in OPTIMIZERS]
PARAMS += [
    ("adam", {"adam_w_mode": False}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]


def test_the_registry_defines_every_optimizer_type():
    assert {*get_args(OptimizerType), "adam8bit"} == set(OPTIMIZERS)


@pytest.mark.parametrize(("name", "params"), PARAMS)
def test_the_registry_lists_the_state_tensors_and_their_shape(name, params):
    optimizer, parameters = new_optimizer(name, **params)
    step(optimizer, parameters)
    found = set()
    for parameter in parameters:
        for kind, tensor in state_tensors(optimizer, parameter).items():
            found.add(kind)
            assert tensor.shape == state_shape(kind, parameter.shape)
    expected = set(OPTIMIZERS[name].state_tensors)
    assert found == (expected if params or name != "sgd" else set()), (
        "SGD without momentum has no state"
    )


@pytest.mark.parametrize(("name", "params"), PARAMS)
def test_a_restored_state_continues_like_an_uninterrupted_run(name, params):
    optimizer, parameters = new_optimizer(name, **params)
    step(optimizer, parameters)
    fresh, resumed = new_optimizer(name, **params)
    for parameter, copy in zip(parameters, resumed, strict=True):
        copy.data.copy_(parameter.data)
        tensors = state_tensors(optimizer, parameter)
        state = initialize_state(fresh, copy, list(tensors)) if tensors else {}
        for kind, tensor in tensors.items():
            assert state[kind].dtype == tensor.dtype
            state[kind].copy_(tensor)
        assert get_step(fresh, {}, copy) == 0
        set_step(fresh, {}, copy, get_step(optimizer, {}, parameter))
    step(optimizer, parameters)
    step(fresh, resumed)
    for parameter, copy in zip(parameters, resumed, strict=True):
        assert torch.equal(parameter, copy)
        assert get_step(fresh, {}, copy) == get_step(optimizer, {}, parameter)


@pytest.mark.parametrize("name", ["adam", "lion", "sgd"])
def test_a_restored_state_of_a_run_that_has_skipped_all_steps_is_updated(name):
    """A fused optimizer skips a step on the device, and leaves a state with the step count 0."""
    optimizer, parameters = new_optimizer(name)
    for parameter in parameters:
        initialize_state(optimizer, parameter, OPTIMIZERS[name].state_tensors)
        set_step(optimizer, optimizer.param_groups[0], parameter, 0)
        assert get_step(optimizer, {}, parameter) == 0
    before = [parameter.detach().clone() for parameter in parameters]
    step(optimizer, parameters)
    for parameter, value in zip(parameters, before, strict=True):
        assert not torch.equal(parameter, value)


@pytest.mark.parametrize("shape", [(4, 6), (3, 1, 1), (2, 3, 4)])
def test_shapes_of_the_state_of_adafactor(shape):
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer, _ = build_optimizer("adafactor", [{"params": [parameter]}], {})
    step(optimizer, [parameter])
    state = optimizer.state[parameter]
    for kind in ("row_var", "col_var"):
        assert state[kind].shape == state_shape(kind, shape)


def test_adam_w_mode_selects_decoupled_weight_decay():
    def updated(decoupled):
        weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
        optimizer, description = build_optimizer(
            "adam",
            [{"params": [weight], "weight_decay": 0.5}],
            {"lr": 0.1, "adam_w_mode": decoupled},
        )
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight[0, 0].item(), description

    # Decoupled: w (1 - lr wd) - lr. L2: the first step of Adam is -lr whatever the size of the
    # gradient.
    assert updated(True) == (pytest.approx(3.0 * 0.95 - 0.1, abs=1e-5), "torch AdamW, fused")
    assert updated(False) == (pytest.approx(2.9, abs=1e-5), "torch Adam, fused")


@pytest.mark.parametrize(
    ("name", "params", "module", "key"),
    [
        ("adam", {"apex": True}, "apex.optimizers", r"optimizer\.params\.apex: NVIDIA"),
        ("adam8bit", {}, "bitsandbytes.optim", "use_bnb_optimizer"),
    ],
)
def test_libraries_must_be_installed(name, params, module, key, monkeypatch):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)
    assert_rejected(
        key, build_optimizer, name, [{"params": [torch.nn.Parameter(torch.ones(1))]}], params
    )
