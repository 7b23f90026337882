"""Methods per layer: each layer has the hooks and the results of its own method."""

import pytest
import torch

from kerple.attention import Attention
from kerple.attention.tables import jacobians
from kerple.positional import ModelShape, PerLayer, build, build_layers, project

SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=5, max_positions=16)
METHODS = ["rotary", {"kerple_log": {"parameters": "shared"}}, {"dape_kerple": None}, "xpos"]
LENGTH = 20


def attend(method, query, key, value):
    positions = torch.arange(LENGTH)
    query, key = method.rotate(query, key, positions, positions)
    return Attention("chunked", method)(query, key, value)


def test_each_layer_is_its_own_method():
    torch.manual_seed(0)
    layers = build_layers("per_layer", SHAPE, methods=METHODS)
    assert len(layers) == 5
    states = torch.randn(3, 1, 2, LENGTH, 8)
    flags = ("hooks", "per_pair", "shift_invariant", "lookahead")
    for layer, (method, name) in enumerate(
        zip(layers, ("rotary", "kerple_log", "dape_kerple", "xpos", "rotary"), strict=True)
    ):
        alone = build(name, SHAPE)
        for part in (method, alone):
            part.reset_parameters(torch.Generator().manual_seed(layer))
        assert not method.shared
        assert {flag: getattr(method, flag) for flag in flags} == {flag: getattr(alone, flag) for flag in flags}
        assert torch.equal(attend(method, *states), attend(alone, *states))
        assert method.statistics().keys() == alone.statistics().keys()
        bias, weight = jacobians(method, LENGTH, "cpu")
        assert weight is None
        assert (bias is not None) == (name == "kerple_log")
        if bias is not None:
            expected = jacobians(alone, LENGTH, "cpu")[0]
            assert torch.equal(bias.directions, expected.directions)
            bias.coefficients.sum().backward()
            assert torch.equal(method.method.bias_p.grad, torch.ones_like(alone.bias_p))
    with torch.no_grad():
        layers[1].method.bias_p.fill_(-1.0)
    project(layers[1])
    assert layers[1].method.bias_p.min() > 0


def test_random_positions_advance():
    method = PerLayer.from_shape(SHAPE, methods=[{"rotary": {"random_range": 64}}]).train()
    states, positions = torch.randn(1, 1, 4, 8), torch.arange(4)
    results = []
    for step in (0, 1):
        method.begin_step(step)
        results.append(method.rotate(states, states, positions, positions)[0])
    assert not torch.equal(*results)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([], r"methods \[\] must be a list of methods"),
        ("rotary", "'rotary'"),
        ([{"rotary": {}, "none": {}}], r"is neither the name of a method nor \{name: options\}"),
        ([{"rotary": 3}], r"is neither the name of a method nor \{name: options\}"),
        ([3], r"is neither the name of a method nor \{name: options\}"),
        (["rotray"], "pos-emb 'rotray'"),
        (["none", "learned"], "learned"),
        (["per_layer"], "per_layer"),
        ([{"rotary": {"fractoin": 1}}], "Rotary.*'fractoin'"),
    ],
)
def test_invalid_lists_are_rejected(methods, message):
    with pytest.raises(ValueError, match=message):
        build_layers("per_layer", SHAPE, methods=methods)
