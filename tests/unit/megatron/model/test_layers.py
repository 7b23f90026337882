"""Norms and MLPs against their formulas in float64, and the layout of query_key_value."""

import pytest
import torch
from torch import Tensor

from megatron.model.layers import GatedMLP, HeadNorm, make_mlp, make_norm, split_heads
from megatron.model.settings import ModelSettings
from tests.support.language_models import model_settings


def settings(**changes) -> ModelSettings:
    return model_settings(hidden_size=12, num_attention_heads=2, **changes)


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module.double()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


@pytest.mark.parametrize("activation", ["swiglu", "geglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_gated_mlp(activation, bias):
    mlp = randomize(
        make_mlp(settings(activation=activation, intermediate_size=60, use_bias_in_mlp=bias))
    )
    assert isinstance(mlp, GatedMLP)
    assert sum(p.numel() for p in mlp.parameters()) == 3 * 12 * 20 + bias * (20 + 20 + 12)
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    zero = torch.zeros(1, dtype=torch.float64)
    gate, up = (x @ layer.weight.T + (layer.bias if bias else zero) for layer in (mlp.w1, mlp.w3))
    gated = gate * (
        sigmoid(gate) if activation == "swiglu" else 0.5 * (1 + torch.erf(gate / 2**0.5))
    )
    torch.testing.assert_close(
        mlp(x), (gated * up) @ mlp.w2.weight.T + (mlp.w2.bias if bias else zero)
    )


def test_mlp_without_bias_and_with_another_size():
    mlp = make_mlp(settings(intermediate_size=20, use_bias_in_mlp=False))
    assert {name: tuple(p.shape) for name, p in mlp.named_parameters()} == {
        "dense_h_to_4h.weight": (20, 12),
        "dense_4h_to_h.weight": (12, 20),
    }


@pytest.mark.parametrize(
    ("norm", "bias"), [("layernorm", True), ("layernorm", False), ("rmsnorm", True)]
)
def test_norms(norm, bias):
    """Over the hidden size, and over each head."""
    centers = norm == "layernorm"
    changes = {
        "norm": norm,
        "use_bias_in_norms": bias,
        "layernorm_epsilon": 0.1,
        "rms_norm_epsilon": 0.1,
    }
    for module, size in (
        (make_norm(settings(**changes).config), 12),
        (HeadNorm(settings(**changes)), 6),
    ):
        randomize(module)
        assert (getattr(module, "bias", None) is not None) == (centers and bias)
        x = torch.randn(2, 3, 5, size, dtype=torch.float64)
        centered = x - x.mean(-1, keepdim=True) * centers
        expected = (
            module.weight * centered / (centered.square().mean(-1, keepdim=True) + 0.1).sqrt()
        )
        torch.testing.assert_close(module(x), expected + (module.bias if centers and bias else 0))


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_split_heads(groups):
    """Rows are numbered, so each result shows its place: per key head, its queries, the key and the
    value.
    """
    shared = 4 // groups
    rows = torch.arange(groups * (shared + 2) * 3.0)
    query, key, value = split_heads(rows.expand(2, 5, -1), 3, shared)
    assert (query.shape, key.shape, value.shape) == (
        (2, 4, 5, 3),
        (2, groups, 5, 3),
        (2, groups, 5, 3),
    )
    expected = rows.view(groups, shared + 2, 3)
    assert torch.equal(query[1, :, 4], expected[:, :shared].reshape(4, 3))
    assert torch.equal(key[1, :, 4], expected[:, shared])
    assert torch.equal(value[1, :, 4], expected[:, shared + 1])
