"""Positional methods as parameters of tests that take long for all of them."""

from typing import Any

import pytest
import torch

from kerple.attention import Attention
from kerple.positional import ModelShape, PositionalMethod, decay_sums, primary_names

# They combine parts of other methods, and have no code for training, caches and exports of their
# own.
VARIANTS = (
    *(
        "dape",
        "dape_v2",
        "dape_alibi",
        "dape_fire",
        "dape_rotary",
        "dape_v2_alibi",
        "dape_v2_fire",
        "dape_v2_rotary",
    ),
    *(
        "kerple_gaussian",
        "kerple_gaussian3",
        "kerple_log3",
        "kerple_power__ap",
        "kerple_power_original",
    ),
)


def methods_and_variants() -> list[Any]:
    """Every method; CI tests the variants."""
    return [
        pytest.param(name, marks=pytest.mark.ci if name in VARIANTS else ())
        for name in primary_names()
    ]


def non_finite_gradients(method: PositionalMethod, shape: ModelShape) -> list[str]:
    """The names of the method's parameters whose gradient is nan or inf after attention to 16
    random tokens.

    A common cause is distance 0, where sqrt(a * distance) and (a * distance)**0.5 are finite, but
    their derivative is 0/0. A single optimizer step then makes all weights nan.
    """
    trained = {
        name: parameter for name, parameter in method.named_parameters() if parameter.requires_grad
    }
    if not trained:
        return []
    length = min(16, shape.max_positions)
    device, positions = next(iter(trained.values())).device, torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, length, shape.hidden_size, generator=generator).to(device)
    # The three columns become query, key and value.
    projection = torch.randn(
        shape.hidden_size, 3 * shape.num_heads * shape.head_size, generator=generator
    )
    projection = (projection * shape.hidden_size**-0.5).to(device)
    method.begin_step(0, length=length)
    with torch.enable_grad():
        states = (method.embed(hidden, positions) @ projection).unflatten(
            -1, (3, shape.num_heads, shape.head_size)
        )
        query, key, value = states.transpose(1, 3).unbind(2)
        sums = decay_sums(method.decay(hidden)) if "decay" in method.hooks else None
        context = Attention(method, "reference")(query, key, value, decay_sums=sums)
        grads = torch.autograd.grad(
            context.square().sum(), list(trained.values()), allow_unused=True
        )
    return [
        name
        for name, grad in zip(trained, grads, strict=True)
        if grad is not None and not grad.isfinite().all()
    ]
