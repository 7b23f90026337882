"""Randomized positions (samples; each kind of method against its formula in float64), and a method
per layer.
"""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch

from kerple.attention import Attention, score_table
from kerple.attention.tables import jacobians
from kerple.positional import (
    ModelShape,
    PerLayer,
    PositionalMethod,
    PositionsExceeded,
    build,
    build_layers,
    primary_names,
    project,
)
from tests.support.attention import modified_scores, xpos_products

RANGE, LENGTH = 50, 6
SHAPE = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=1, max_positions=LENGTH)
POSITIONS = torch.arange(LENGTH)


def random_method(name="rotary", **options):
    return build(name, SHAPE, random_range=RANGE, **options)


def test_samples_in_training():
    method = random_method()
    with pytest.raises(ValueError, match=r"call begin_step\(step\) first, or eval\(\)"):
        method.sampled(POSITIONS)

    def sample(step, seed=0):
        method.begin_step(step, seed)
        return method.sampled(POSITIONS)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    assert not torch.equal(sample(1), sample(1, seed=5))
    assert torch.equal(method.sampled(POSITIONS[:4]), method.sampled(POSITIONS)[:4])
    samples = torch.stack([sample(step) for step in range(500)])
    assert (samples.diff(dim=1) > 0).all()
    assert samples.min() == 0
    assert samples.max() == RANGE - 1
    # The k-th smallest of n without repetition from 0 ... L - 1 is (L + 1) k / (n + 1) - 1 on
    # average.
    expected = torch.tensor([(RANGE + 1) * k / (LENGTH + 1) - 1 for k in range(1, LENGTH + 1)])
    torch.testing.assert_close(samples.float().mean(0), expected, rtol=0, atol=1.5)
    with pytest.raises(PositionsExceeded, match=r"position 6 .*6"):
        method.sampled(torch.arange(7))


def test_the_sample_of_a_training_step_is_as_long_as_its_sequences():
    method = random_method(random_length=RANGE)
    method.begin_step(1, 0, 3)
    few = method.sampled(torch.arange(3))
    assert few.max() > 2
    method.begin_step(1, 0, RANGE)
    assert torch.equal(method.sampled(torch.arange(RANGE)), torch.arange(RANGE))


def test_samples_in_evaluation_do_not_depend_on_the_length():
    method = random_method(random_length=20).eval()
    expected = method.sampled(torch.arange(20))
    assert (expected.diff() > 0).all()
    assert torch.equal(method.sampled(torch.arange(7, 12)), expected[7:12])
    assert not torch.equal(
        random_method(random_length=20, random_seed=1).eval().sampled(torch.arange(20)), expected
    )
    with pytest.raises(PositionsExceeded, match=r"20.*random_length"):
        method.sampled(torch.tensor([20]))


def test_each_evaluated_length_has_its_own_sample():
    method = random_method(random_length=20).eval()
    for length in (5, 30):
        method.begin_text(length)
        assert torch.equal(
            method.sampled(torch.arange(length)),
            random_method(random_length=length).eval().sampled(torch.arange(length)),
        )
    method.begin_text(RANGE + 1)
    with pytest.raises(PositionsExceeded, match=rf"{RANGE + 1} tokens .* random_range {RANGE}"):
        method.sampled(torch.arange(2))
    method.begin_text(None)
    expected = random_method(random_length=20).eval().sampled(torch.arange(20))
    assert torch.equal(method.sampled(torch.arange(20)), expected)


def test_tables_of_texts_that_are_longer_than_the_range():
    with pytest.raises(PositionsExceeded, match=r"51.*random_range 50"):
        score_table(random_method("alibi"), RANGE + 1, "cpu")


def check_attention(method, plain, scores_of, causal=True):
    """Values, and gradients of states and parameters, for scores of (query, key, sampled positions,
    masked keys).
    """
    assert method.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(method.state_dict())
    method.begin_step(1)
    positions = method.sampled(POSITIONS)
    states = [
        torch.randn(2, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)
    ]
    attended = Attention(method, "chunked")(*states, causal=causal)

    future = torch.ones(LENGTH, LENGTH).triu(1).bool() & causal
    scores = scores_of(*plain.rotate(*states[:2], positions, positions), positions, future)
    expected = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ states[2]
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-6)
    upstream = torch.randn(attended.shape, dtype=torch.float64)
    for actual, exact in zip(
        torch.autograd.grad(attended, (*states, *method.parameters()), upstream),
        torch.autograd.grad(expected, (*states, *plain.parameters()), upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "name", ["alibi", "rpe", "kerple_power_ap_ap", "kerple_power__ap", "kerple_log_rotary"]
)
def test_attention_at_sampled_positions(name, causal):
    torch.manual_seed(0)
    plain = build(name, SHAPE)

    def scores_of(query, key, positions, future):
        scores, distance = (
            query @ key.transpose(-1, -2) / 8**0.5,
            (positions[:, None] - positions).abs().float(),
        )
        if "weight" in plain.hooks:
            scores = scores * plain.weight(distance)
        return scores + plain.bias(distance) if "bias" in plain.hooks else scores

    check_attention(random_method(name).train(), plain, scores_of, causal)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "name",
    ["fire", "dape_kerple", "dape_rotary", "transformer_xl", "dape_v2_kerple", "dape_v2_fire"],
)
def test_scores_of_methods_that_modify_them(name):
    torch.manual_seed(0)
    plain = build(name, SHAPE).double()

    def scores_of(query, key, positions, future):
        scores, distance = query @ key.transpose(-1, -2) / 8**0.5, positions[:, None] - positions
        return modified_scores(plain, scores, query, distance, future, positions[:, None])

    check_attention(random_method(name).train().double(), plain, scores_of)


@pytest.mark.parametrize("name", ["dape_v2_kerple", "dape_v2_rotary"])
@torch.no_grad()
def test_a_query_alone_has_the_result_of_the_complete_text(name):
    """Also if the convolution reads keys after it, which have no sampled positions then."""
    torch.manual_seed(0)
    method = build(name, ModelShape(2, 8, 16, 1, 16), random_range=32).eval()
    query, key, value = torch.randn(3, 1, 2, 16, 8).unbind()
    complete = Attention(method, "chunked")(query, key, value)
    for end in range(1, 17):
        alone = Attention(method, "chunked")(
            query[:, :, end - 1 : end], key[:, :, :end], value[:, :, :end]
        )
        torch.testing.assert_close(alone[:, :, 0], complete[:, :, end - 1])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("training", [True, False])
def test_xpos_decays_with_sampled_distances(training):
    """In segments whose sampled positions span more than `scale_base` each, so that their factors
    differ.
    """
    torch.manual_seed(0)
    assert random_method("xpos").causal_only
    method, plain = (
        build("xpos", SHAPE, scale_base=8, **options) for options in ({"random_range": RANGE}, {})
    )
    plain.rotate = lambda query, key, *_: (query, key)  # `xpos_products` rotates

    def scores_of(query, key, positions, future):
        return xpos_products(query, key, positions[:, None] - positions, method.scale_base) / 8**0.5

    check_attention(method.train(training), plain, scores_of)
    assert method.segment == 32 * LENGTH // RANGE


@pytest.mark.parametrize("name", ["sinusoidal", "p_rope"])
def test_embeddings_and_rotations_at_sampled_positions(name):
    method, plain = random_method(name).train(), build(name, SHAPE)
    method.begin_step(0)
    positions = copy.copy(method).sampled(POSITIONS)
    hidden, states = torch.randn(1, LENGTH, 16), torch.randn(1, 2, LENGTH, 8)
    assert "modify_scores" not in method.hooks
    assert torch.equal(method.embed(hidden, POSITIONS), plain.embed(hidden, positions))
    rotated, expected = (
        part.rotate(states, states, p, p)[0]
        for part, p in ((method, POSITIONS), (plain, positions))
    )
    assert torch.equal(rotated, expected)


def test_pickled_methods():
    method = random_method("fire")
    method.begin_step(3)
    loaded = pickle.loads(pickle.dumps(method))
    assert type(loaded) is type(method) is type(random_method("fire"))
    assert torch.equal(loaded.sampled(POSITIONS), method.sampled(POSITIONS))
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, method.state_dict()[key])


def test_methods_without_positions_are_rejected():
    without = {
        "dape",
        "dape_v2",
        "cope",
        "none",
        "forgetting",
        "cable",
        "stick_breaking",
        "per_layer",
    }
    for name in primary_names():
        with pytest.raises(ValueError, match="random_range") if name in without else nullcontext():
            random_method(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("rotary", {"random_length": 7}, "random_range"),
        ("rotary", {"random_range": 5}, "random_length 6.*random_range 5"),
        ("rotary", {"random_range": 9.5}, r"random_range 9\.5"),
        ("rotary", {"random_range": 9, "random_length": 0}, "random_length 0"),
        (
            "rotary",
            {"random_range": 9, "scaling": "dynamic", "factor": 2},
            "Rotary needs consecutive positions",
        ),
        ("per_layer", {"methods": []}, r"methods \[\]"),
        ("per_layer", {"methods": "rotary"}, "'rotary'"),
        ("per_layer", {"methods": [{"rotary": {}, "none": {}}]}, "{'rotary': {}, 'none': {}}"),
        ("per_layer", {"methods": [{"rotary": 3}]}, "{'rotary': 3}"),
        ("per_layer", {"methods": [3]}, "methods: 3 "),
        ("per_layer", {"methods": ["rotray"]}, "pos-emb 'rotray'"),
        ("per_layer", {"methods": ["none", "learned"]}, "learned"),
        ("per_layer", {"methods": ["per_layer"]}, "per_layer"),
        ("per_layer", {"methods": [{"rotary": {"fractoin": 1}}]}, "Rotary.*'fractoin'"),
    ],
)
def test_invalid_options_are_rejected(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, SHAPE, **options)


LAYERS = ModelShape(num_heads=2, head_size=8, hidden_size=16, num_layers=5, max_positions=16)
METHODS = ["rotary", {"kerple_log": {"parameters": "shared"}}, {"dape_kerple": None}, "xpos"]
TOKENS = 20


def attend(method, query, key, value):
    return Attention(method, "chunked")(query, key, value)


def test_each_layer_is_its_own_method():
    torch.manual_seed(0)
    layers = build_layers("per_layer", LAYERS, methods=METHODS)
    assert len(layers) == 5
    states = torch.randn(3, 1, 2, TOKENS, 8)
    flags = ("hooks", "per_pair", "shift_invariant", "lookahead")
    for layer, (method, name) in enumerate(
        zip(layers, ("rotary", "kerple_log", "dape_kerple", "xpos", "rotary"), strict=True)
    ):
        alone = build(name, LAYERS)
        for part in (method, alone):
            part.reset_parameters(torch.Generator().manual_seed(layer))
        assert not method.shared
        assert {flag: getattr(method, flag) for flag in flags} == {
            flag: getattr(alone, flag) for flag in flags
        }
        assert torch.equal(attend(method, *states), attend(alone, *states))
        assert method.statistics().keys() == alone.statistics().keys()
        bias, weight = jacobians(method, TOKENS, "cpu")
        assert weight is None
        assert (bias is not None) == (name == "kerple_log")
        if bias is not None:
            expected = jacobians(alone, TOKENS, "cpu")[0]
            assert torch.equal(bias.directions, expected.directions)
            bias.coefficients.sum().backward()
            assert torch.equal(method.method.bias_p.grad, torch.ones_like(alone.bias_p))
    with torch.no_grad():
        layers[1].method.bias_p.fill_(-1.0)
    project(layers[1])
    assert layers[1].method.bias_p.min() > 0


# Methods that differ from the base class in each of these attributes.
ENTRIES = [
    {"rotary": {"scaling": "yarn", "factor": 4.0}},
    {"rotary": {"scaling": "dynamic", "factor": 2.0}},
    {"rpe": {"bidirectional": True}},
    "fire",
    "stick_breaking",
    "dape_v2_kerple",
    "transformer_xl",
    "xpos",
]
ATTRIBUTES = ("hooks", "per_pair", "shift_invariant", "lookahead", "counts_from_start", "signed")
ATTRIBUTES += ("causal_only", "turns", "interpolated", "score_scale", "length_dependent")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_layer_has_the_attributes_of_its_method(entry):
    method = build("per_layer", LAYERS, methods=[entry])
    for name in ATTRIBUTES:
        assert getattr(method, name) == getattr(method.method, name), name


def test_the_entries_cover_the_attributes():
    for name in ATTRIBUTES:
        default = getattr(PositionalMethod, name)
        methods = [build("per_layer", LAYERS, methods=[each]).method for each in ENTRIES]
        assert any(getattr(method, name) != default for method in methods), name


def test_a_layer_for_longer_texts():
    """The base for longer texts, mapped distances and the options of training are the method's."""
    positions, states = torch.arange(4), torch.randn(1, 2, 4, 8)
    rotary, layer = build("rotary", LAYERS), build("per_layer", LAYERS, methods=["rotary"])
    expected = rotary.stretched(2.0).rotate(states, states, positions, positions)[0]
    found = layer.stretched(2.0).rotate(states, states, positions, positions)[0]
    assert torch.equal(found, expected)
    distances = torch.tensor([0.0, 0.5, 1.0])
    assert torch.equal(
        build("per_layer", LAYERS, methods=["fire"]).mapped_table(distances), distances
    )
    methods = [{"rotary": {"fraction": 0.5, "scaling": "linear", "factor": 2.0}}, "none"]
    trained = {"methods": [{"rotary": {"fraction": 0.5}}, {"none": {}}]}
    assert PerLayer.trained_options(methods=methods) == trained


def test_a_layer_with_random_positions_has_the_sample_of_the_text():
    options = {"random_range": 64, "random_length": 16}
    layer = build("per_layer", LAYERS, methods=[{"rotary": options}]).eval()
    alone = build("rotary", LAYERS, **options).eval()
    positions, states = torch.arange(4), torch.randn(1, 2, 4, 8)
    for length in (9, None):
        found = []
        for method in (layer, alone):
            method.begin_text(length)
            found.append(method.rotate(states, states, positions, positions)[0])
        assert torch.equal(*found)
    for method in (layer, alone):
        method.train().begin_step(3, 7, 5)
    assert torch.equal(layer.method.sampled(positions), alone.sampled(positions))


def test_sampled_positions_have_no_far_positions_and_no_direction():
    assert not random_method("rotary").turns
    assert random_method("rpe", bidirectional=True).causal_only
    assert not random_method("rpe").causal_only


def test_random_positions_advance():
    method = PerLayer.from_shape(LAYERS, methods=[{"rotary": {"random_range": 64}}]).train()
    states, positions = torch.randn(1, 1, 4, 8), torch.arange(4)
    results = []
    for step in (0, 1):
        method.begin_step(step)
        results.append(method.rotate(states, states, positions, positions)[0])
    assert not torch.equal(*results)
