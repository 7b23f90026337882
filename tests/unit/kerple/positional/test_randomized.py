"""Randomized positions: the samples, and each kind of method against its formula at sampled positions in float64."""

import copy

import pytest
import torch

from kerple.attention import Attention, score_table
from kerple.positional import ModelShape, PositionsExceeded, build, primary_names

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
    # The k-th smallest of n without repetition from 0 ... L - 1 is (L + 1) k / (n + 1) - 1 on average.
    expected = torch.tensor([(RANGE + 1) * k / (LENGTH + 1) - 1 for k in range(1, LENGTH + 1)])
    torch.testing.assert_close(samples.float().mean(0), expected, rtol=0, atol=1.5)
    with pytest.raises(PositionsExceeded, match="position 6 is beyond the 6 positions of this training step"):
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
    assert not torch.equal(random_method(random_length=20, random_seed=1).eval().sampled(torch.arange(20)), expected)
    with pytest.raises(PositionsExceeded, match="position 20 is beyond random_length 20"):
        method.sampled(torch.tensor([20]))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["alibi", "rpe", "kerple_power_ap_ap", "kerple_power__ap", "kerple_log_rotary"])
def test_attention_at_sampled_positions(name):
    """Values, and gradients of states and parameters."""
    torch.manual_seed(0)
    method, plain = random_method(name).train(), build(name, SHAPE)
    assert method.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(method.state_dict())
    method.begin_step(3)
    positions = method.sampled(POSITIONS)
    states = [torch.randn(2, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    rotated = method.rotate(*states[:2], POSITIONS, POSITIONS)
    table = score_table(method, LENGTH, "cpu")
    attended = Attention("chunked", method)(*rotated, states[2], table=table)

    query, key = plain.rotate(*states[:2], positions, positions)
    scores = query @ key.transpose(-1, -2) / 8**0.5
    distance = (positions[:, None] - positions).clamp(min=0).float()
    if plain.has_weight:
        scores = scores * plain.weight(distance)
    if plain.has_bias:
        scores = scores + plain.bias(distance)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
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
@pytest.mark.parametrize("name", ["fire", "dape_kerple", "dape_fire", "dape_rotary"])
def test_scores_of_methods_that_modify_them(name):
    method = random_method(name).train().double()
    method.begin_step(1)
    plain = build(name, SHAPE).double()
    plain.load_state_dict(method.state_dict())
    positions = method.sampled(POSITIONS)
    query, key, value = torch.randn(3, 1, 2, LENGTH, 8, dtype=torch.float64).unbind(0)
    rotated = method.rotate(query, key, POSITIONS, POSITIONS)
    attended = Attention("chunked", method)(*rotated, value, table=score_table(method, LENGTH, "cpu"))

    query, key = plain.rotate(query, key, positions, positions)
    scores = query @ key.transpose(-1, -2) / 8**0.5
    if name == "fire":
        scores = scores + plain.pair_bias(positions, positions, scores)
    else:
        bias = None
        if name == "dape_kerple":
            bias = plain.static.bias((positions[:, None] - positions).abs().double()).to(scores.dtype)
        elif name == "dape_fire":
            bias = plain.static.pair_bias(positions, positions, scores)
        inputs = scores if bias is None else torch.cat((scores, bias[None]), dim=1)
        hidden = plain.first(inputs.movedim(1, -1))
        change = plain.second(torch.nn.functional.leaky_relu(hidden, 0.01)).movedim(-1, 1)
        scores = scores + change + (0 if bias is None else bias)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    expected = scores.masked_fill(future, float("-inf")).softmax(dim=-1) @ value
    torch.testing.assert_close(attended, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["sinusoidal", "p_rope"])
def test_embeddings_and_rotations_at_sampled_positions(name):
    method, plain = random_method(name).train(), build(name, SHAPE)
    method.begin_step(0)
    positions = copy.copy(method).sampled(POSITIONS)
    hidden, states = torch.randn(1, LENGTH, 16), torch.randn(1, 2, LENGTH, 8)
    assert not method.modifies_scores
    assert torch.equal(method.embed(hidden, POSITIONS), plain.embed(hidden, positions))
    rotated, expected = (part.rotate(states, states, p, p)[0] for part, p in ((method, POSITIONS), (plain, positions)))
    assert torch.equal(rotated, expected)


def test_methods_that_need_consecutive_positions_are_rejected():
    rejected = {}
    for name in primary_names():
        try:
            random_method(name)
        except ValueError as error:
            rejected[name] = str(error)
    for name, message in rejected.items():
        assert "random_range" in message, name
    kinds = ("dape_v2", "cope", "transformer_xl", "xpos", "none", "forgetting", "cable", "stick", "per_layer")
    assert {"dape", *(name for name in primary_names() if name.startswith(kinds))} == set(rejected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random_length": 7}, "random positions need random_range"),
        ({"random_range": 5}, "random_length 6 different positions are drawn from random_range 5"),
        ({"random_range": 9.5}, "random_range 9.5 must be an integer"),
        ({"random_range": 9, "scaling": "dynamic", "factor": 2}, "Rotary needs consecutive positions"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        build("rotary", SHAPE, **options)
