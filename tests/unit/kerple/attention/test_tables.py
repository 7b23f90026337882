"""Tables over distance: devices, rounding, and the distances of pairs."""

import torch

from kerple.attention import jacobians, position_tables, score_table, tables
from kerple.attention.tables import lookup
from kerple.positional import ModelShape, build
from kerple.positional.distance_maps import Clip

SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)


def test_tables_are_on_the_requested_device():
    """ALiBi has no parameters, whose device would be known."""
    assert tables(build("alibi", SHAPE), 20, "meta")[0].is_meta
    assert score_table(build("dape_alibi", SHAPE).to("meta"), 20, "meta").is_meta
    jacobian, _ = jacobians(build("rpe", SHAPE).to("meta"), 20, "meta")
    assert jacobian.directions.is_meta


def test_tables_cover_the_distances():
    bias, weight = tables(build("kerple_bias_wht", SHAPE), 5, "cpu")
    assert bias.shape == weight.shape == (4, 5)
    assert bias.dtype == weight.dtype == torch.float32
    assert (bias[:, 0] == 0).all()
    assert (weight[:, 0] == 1).all()
    assert tables(build("rotary", SHAPE), 5, "cpu") == (None, None)


def test_tables_from_a_distance_on():
    method = build("kerple_bias_wht", SHAPE)
    for whole, part in zip(
        tables(method, 20, "cpu"), tables(method, 20, "cpu", first=7), strict=True
    ):
        assert torch.equal(part, whole[:, 7:])
    method = build("dape_alibi", SHAPE)
    part = score_table(method, 20, "cpu", first=7)
    assert torch.equal(part, score_table(method, 20, "cpu")[:, 7:])


def test_tables_at_mapped_distances():
    """Without jacobians, which are those of other distances. FIRE gets the distances."""
    nearest = torch.arange(9.0).clamp(max=3)
    options = {"with_jacobians": True, "distance_map": Clip(3)}
    method = build("kerple_log", SHAPE)
    mapped = position_tables(method, 9, "cpu", **options)
    assert torch.equal(mapped.bias, method.bias(nearest))
    assert mapped.bias_jacobian is None
    method = build("dape_alibi", SHAPE)
    mapped = position_tables(method, 9, "cpu", **options)
    assert torch.equal(mapped.scores, method.table(nearest))
    for name in ("fire", "dape_fire"):
        mapped = position_tables(build(name, SHAPE), 9, "cpu", **options)
        assert torch.equal(mapped.scores, nearest)


def test_tables_of_both_directions():
    distance = torch.arange(5)[:, None] - torch.arange(5)
    rows = torch.stack((distance, distance.T))
    method = build("rpe", SHAPE, bidirectional=True)
    found = position_tables(method, 5, "cpu", causal=False)
    assert found.signed
    assert not position_tables(method, 5, "cpu").signed
    assert torch.equal(lookup(found.bias, distance), method.bias(distance.float()))
    expected = method.bias(rows.float()).transpose(0, 1)
    assert torch.equal(lookup(found.bias, rows), expected)


def test_rounded_distances_collapse_as_in_the_release():
    method = build("kerple_log", SHAPE)
    with torch.no_grad():
        rounded, exact = (
            tables(method, 16_384, "cpu", rounded=value)[0] for value in (True, False)
        )
    # bfloat16 has 8 significant bits: 256 integers, then 128 values for each doubling up to 2^14,
    # and 2^14.
    distances = torch.arange(16_384).bfloat16().unique()
    assert len(distances) == 256 + 6 * 128 + 1
    assert all(row.unique().numel() <= len(distances) for row in rounded)
    assert all(row.unique().numel() > 10 * len(distances) for row in exact)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert torch.equal(rounded[:, 4001], rounded[:, 4000])
    assert not torch.equal(exact[:, 4001], exact[:, 4000])

    # The distance itself is rounded: 257 to 256, whose square is 65,536.
    square = build("kerple_power", SHAPE)
    torch.nn.init.ones_(square.bias_a)
    torch.nn.init.constant_(square.bias_p, 2.0)
    assert tables(square, 258, "cpu", rounded=True)[0][0, 257] == -65_536


def test_rounded_tables_are_those_of_bfloat16_arithmetic():
    method = build("kerple_log", SHAPE)
    for parameter in method.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        rounded = tables(method, 16_384, "cpu", rounded=True)[0]
    # The release computed -p log(1 + a δ) in bfloat16, and rounded every operation.
    distance = torch.arange(16_384, dtype=torch.bfloat16)
    p, a = (
        getattr(method, name).detach().bfloat16().reshape(-1, 1) for name in ("bias_p", "bias_a")
    )
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
