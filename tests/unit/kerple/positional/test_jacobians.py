"""A table's derivatives by a few numbers per head, against autograd through the table."""

import pytest
import torch

from kerple.attention import jacobians, tables
from kerple.positional import ModelShape, build, primary_names
from kerple.positional.alibi import Alibi
from kerple.positional.base import TableJacobian
from kerple.positional.kerple import KerpleLog

SHAPE = ModelShape(num_heads=3, head_size=16, hidden_size=48, num_layers=1, max_positions=300)
LENGTH = 300
EXPRESSIONS = {"bias": "log + 0.5 gaussian3", "weight": "power"}
FOUND = {name: jacobians(build(name, SHAPE), LENGTH, "cpu") for name in primary_names()}


def gradients(method, upstreams: list[torch.Tensor], found) -> list[torch.Tensor]:
    """Of the parameters, for upstream gradients of the tables: through the tables, but for what is found."""
    total = torch.zeros(())
    for table, upstream, one in zip(tables(method, LENGTH, "cpu"), upstreams, found, strict=True):
        if table is None:
            continue
        nearer = upstream if one is None else upstream * (torch.arange(LENGTH) < one.dense)
        total = total + (table * nearer).sum()
        if one is not None:
            beyond = upstream * (torch.arange(LENGTH) >= one.dense)
            total = total + (one.coefficients * torch.einsum("hpn,hn->hp", one.directions, beyond)).sum()
    return torch.autograd.grad(total, list(method.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name, found in FOUND.items() if any(found)] + [("kerple", EXPRESSIONS)],
)
def test_the_same_gradients_as_through_the_table(name, options):
    torch.manual_seed(0)
    method = build(name, SHAPE, **options)
    upstreams = [torch.randn(SHAPE.num_heads, LENGTH) for _ in range(2)]
    found = jacobians(method, LENGTH, "cpu")
    for one in found:
        assert one is None or not one.directions.requires_grad
    expected = gradients(method, upstreams, (None, None))
    for mine, wanted in zip(gradients(method, upstreams, found), expected, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-3)


def test_every_kernel_has_them():
    """KERPLE's kernels, and T5 for its last bucket; ALiBi has nothing to learn."""
    kernels = {name for name in FOUND if name.startswith("kerple")}
    assert {name for name, found in FOUND.items() if any(found)} == kernels - {"kerple_power_original"} | {"rpe"}
    assert FOUND["kerple_power_ap_ap"][1].directions.shape == (3, 2, LENGTH)
    assert FOUND["rpe"][0].dense == 113


def test_a_subclass_with_another_bias_does_not_inherit_them():
    class Steeper(KerpleLog):
        def bias(self, distance):
            return 2 * super().bias(distance)

    assert jacobians(KerpleLog(2), 8, "cpu")[0] is not None
    assert jacobians(Steeper(2), 8, "cpu") == (None, None)


def test_a_method_may_add_its_own():
    class Learned(Alibi):
        def bias_jacobian(self, distance):
            return TableJacobian(torch.ones(2, 1), distance.expand(2, 1, -1))

    assert jacobians(Learned(2), 8, "cpu")[0].directions.shape == (2, 1, 8)
