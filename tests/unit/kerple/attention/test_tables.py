"""Tables over distance: devices, rounding, and the distances of pairs."""

import pytest
import torch

from kerple.attention import Span, jacobians, score_table, tables
from kerple.attention.tables import pair_distances
from kerple.positional import ModelShape, build, primary_names

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)


@pytest.mark.parametrize("name", primary_names())
def test_tables_are_on_the_requested_device(name):
    """Also for methods without parameters, such as ALiBi."""
    method = build(name, SHAPE).to("meta")
    results = [*tables(method, 20, "meta"), score_table(method, 20, "meta")]
    for jacobian in jacobians(method, 20, "meta"):
        results += [] if jacobian is None else [jacobian.coefficients, jacobian.directions]
    present = [tensor for tensor in results if tensor is not None]
    assert all(tensor.device.type == "meta" for tensor in present)
    assert bool(present) or not method.hooks & {"bias", "weight"}


def test_tables_cover_the_distances():
    bias, weight = tables(build("kerple_bias_wht", SHAPE), 5, "cpu")
    assert bias.shape == weight.shape == (4, 5)
    assert bias.dtype == weight.dtype == torch.float32
    assert (bias[:, 0] == 0).all()
    assert (weight[:, 0] == 1).all()
    assert tables(build("rotary", SHAPE), 5, "cpu") == (None, None)


def test_distances_of_masked_pairs_are_zero():
    queries, keys = range(3, 6), range(1, 6)
    distance = pair_distances(queries, keys, Span(window=3).mask(queries, keys, "cpu"))
    assert distance.tolist() == [[2, 1, 0, 0, 0], [0, 2, 1, 0, 0], [0, 0, 2, 1, 0]]


def test_rounded_distances_collapse_as_in_the_release():
    method = build("kerple_log", SHAPE)
    with torch.no_grad():
        rounded, exact = (tables(method, 16_384, "cpu", rounded=value)[0] for value in (True, False))
    # bfloat16 has 8 significant bits: 256 integers, then 128 values for each doubling up to 2^14, and 2^14.
    distances = torch.arange(16_384).bfloat16().unique()
    assert len(distances) == 256 + 6 * 128 + 1
    assert all(row.unique().numel() <= len(distances) for row in rounded)
    assert all(row.unique().numel() > 10 * len(distances) for row in exact)
    assert torch.equal(rounded[:, 4001], rounded[:, 4000])
    assert not torch.equal(exact[:, 4001], exact[:, 4000])


def test_rounded_tables_are_those_of_bfloat16_arithmetic():
    method = build("kerple_log", SHAPE)
    for parameter in method.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        rounded = tables(method, 16_384, "cpu", rounded=True)[0]
    # The release computed -p log(1 + a δ) in bfloat16, and rounded every operation.
    distance = torch.arange(16_384, dtype=torch.bfloat16)
    p, a = (getattr(method, name).detach().bfloat16().reshape(-1, 1) for name in ("bias_p", "bias_a"))
    expected = (-p * torch.log(1 + a * distance)).float()
    torch.testing.assert_close(rounded, expected, rtol=4 * 2.0**-8, atol=2.0**-7)


def test_gradients_pass_the_rounding():
    method = build("kerple_log", SHAPE)
    grads = []
    for rounded in (True, False):
        method.zero_grad()
        tables(method, 100, "cpu", rounded=rounded)[0].sum().backward()
        grads.append(method.bias_p.grad.clone())
    torch.testing.assert_close(*grads, rtol=1e-2, atol=0)
