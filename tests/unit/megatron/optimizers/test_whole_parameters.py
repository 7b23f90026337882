"""Updates of whole parameters in flat tensors, compared with the library's.

Parameters that are split over ranks are tested in tests/integration/test_parallel_optimizers.py.
"""

import pytest
import torch

from megatron.optimizers.registry import build_optimizer
from megatron.optimizers.whole_parameters import Fragment, WholeParameterOptimizer

SHAPES = {"matrix": (64, 70), "other": (8, 64), "bias": (6,)}


def groups(parameters):
    """Two parameter groups: the matrices, with weight decay, and the bias, with another learning
    rate.
    """
    matrix, other, bias = parameters
    return [
        {"params": [matrix, other], "weight_decay": 0.1, "matrices": True},
        {"params": [bias], "weight_decay": 0.0, "lr_factor": 2.0},
    ]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()
    ]


def flat_optimizer(name):
    """An optimizer, not attached, whose groups contain one flat tensor each, and the fragments by
    parameter.
    """
    copies = parameters()
    optimizer = WholeParameterOptimizer(build_optimizer(name, groups(copies), {"lr": 0.01})[0])
    named = dict(zip(SHAPES, copies, strict=True))
    fragments = {}
    for group, names in zip(optimizer.param_groups, (("matrix", "other"), ("bias",)), strict=True):
        padding = torch.zeros(5)
        flat = torch.cat([*(named[name].detach().flatten() for name in names), padding])
        group["params"] = [flat]
        offset = 0
        for parameter in names:
            shape = torch.Size(SHAPES[parameter])
            master = flat.narrow(0, offset, shape.numel())
            fragments[parameter] = Fragment(shape, 0, master, group, flat, offset)
            offset += shape.numel()
    return optimizer, fragments


def attach(optimizer, fragments):
    tensors = [group["params"][0] for group in optimizer.param_groups]
    optimizer.attach(fragments, tensors, split_dims={}, tensor_rank=0, group=None)


@pytest.mark.parametrize("name", ["muon", "adafactor", "adam8bit"])
def test_flat_tensors_are_updated_like_parameters(name):
    """With a learning rate that changes, and one step per group, as in ZeRO."""
    optimizer, fragments = flat_optimizer(name)
    attach(optimizer, fragments)
    expected = parameters()
    library, _ = build_optimizer(name, groups(expected), {"lr": 0.01})
    for step in range(1, 4):
        for group in (*optimizer.param_groups, *library.param_groups):
            group["lr"] = 0.01 / step * group.get("lr_factor", 1.0)
        for parameter in expected:
            parameter.grad = parameter.detach().sin()
        library.step()
        for group in optimizer.param_groups:
            (flat,) = group["params"]
            flat.grad = flat.sin()
            optimizer.step()
            flat.grad = None
    for fragment, parameter in zip(fragments.values(), expected, strict=True):
        assert torch.equal(fragment.master.view(parameter.shape), parameter)
    owned = optimizer.owned(with_weights=True)
    assert {key: fragment.shape for key, fragment in owned.items()} == SHAPES
    for fragment, parameter in zip(owned.values(), expected, strict=True):
        assert torch.equal(fragment.master.view(parameter.shape), parameter)
        state = library.state[parameter]
        assert optimizer.inner.state[fragment.key].keys() == state.keys()
        assert all(
            torch.equal(fragment.of(value), value.flatten())
            for value in state.values()
            if torch.is_tensor(value)
        )


def test_a_step_before_the_parameters_are_known_does_nothing():
    """ZeRO 3 calls step once to create the state."""
    optimizer, fragments = flat_optimizer("muon")
    before = fragments["matrix"].master.clone()
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
    assert torch.equal(fragments["matrix"].master, before)
    assert not optimizer.inner.state
