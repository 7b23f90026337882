"""Forgetting attention and CABLE against their formulas, and the bias of a decay against sums, in
float64.
"""

import pytest
import torch

from kerple.positional import Cable, Forgetting, append_decay, decay_sums
from kerple.positional.decay import PARTS, appended_sums
from tests.support.attention import attend_with

SIZE, LENGTH = 8, 150


def exact_attention(query, key, value, decay, window=LENGTH):
    """The formula: the bias is the sum of the decays after the key, up to the query; matrices in
    memory.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    length = query.shape[2]
    token = torch.arange(length)
    inside = (token[None, None] <= token[:, None, None]) & (
        token[None, None] > token[None, :, None]
    )
    bias = torch.einsum("bhk,ijk->bhij", decay, inside.to(decay))
    scores = query @ key.transpose(-1, -2) * query.shape[3] ** -0.5 + bias
    distance = token[:, None] - token
    return (
        scores.masked_fill((distance < 0) | (distance >= window), float("-inf")).softmax(dim=-1)
        @ value
    )


def random_states(heads, kv_heads, dtype, steepness=0.2):
    torch.manual_seed(0)
    query = torch.randn(2, heads, LENGTH, SIZE)
    key, value = torch.randn(2, 2, kv_heads, LENGTH, SIZE)
    decay = -steepness * torch.rand(2, heads, LENGTH)
    states = (
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        decay.to(torch.promote_types(dtype, torch.float32)),
    )
    return [state.requires_grad_() for state in states]


TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("backend", "dtype", "window"),
    [
        ("reference", torch.float64, None),
        ("chunked", torch.float64, 70),
        ("sdpa", torch.float64, None),
        ("chunked", torch.float32, None),
        ("chunked", torch.bfloat16, None),
    ],
)
def test_values_and_gradients(backend, dtype, window, kv_heads):
    states = random_states(4, kv_heads, dtype)
    exact = [state.detach().double().requires_grad_() for state in states]
    attended = attend_with(
        *states[:3], decay_sums=decay_sums(states[3]), backend=backend, window=window
    )
    expected = exact_attention(*exact, window=window or LENGTH)
    upstream = torch.randn(attended.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(attended, states, upstream.to(dtype))
    exact_gradients = torch.autograd.grad(expected, exact, upstream)
    tolerance = TOLERANCES[dtype]
    for actual, exact_value in zip(
        (attended, *gradients), (expected, *exact_gradients), strict=True
    ):
        assert (actual.double() - exact_value).norm() < tolerance * exact_value.norm()


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_gradient_of_a_constant_in_bf16(backend):
    """The bias of a gate is added to the decay of every token: its gradient is a sum of sums, whose
    errors add up.
    """
    states = random_states(4, 4, torch.bfloat16, steepness=0.01)
    exact = [state.detach().double().requires_grad_() for state in states]
    attended = attend_with(*states[:3], decay_sums=decay_sums(states[3]), backend=backend)
    assert attended.dtype == torch.bfloat16
    upstream = torch.randn(attended.shape).to(torch.bfloat16)
    (gradient,) = torch.autograd.grad(attended, states[3], upstream)
    (expected,) = torch.autograd.grad(exact_attention(*exact), exact[3], upstream.double())
    gradient, expected = gradient.double().sum((0, 2)), expected.sum((0, 2))
    assert (gradient - expected).norm() < 0.002 * expected.norm()


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
@pytest.mark.parametrize("queries", [1, 2, 9])
def test_decoding_is_accurate_after_any_length(queries, backend):
    """The sums are those after about 300,000 tokens with gates of 0.5; float32 has steps of 0.016
    there.
    """
    query, key, value, decay = (state.detach() for state in random_states(2, 1, torch.float32))
    sums = decay_sums(decay) - 200_000.0
    attended = attend_with(query[:, :, -queries:], key, value, decay_sums=sums, backend=backend)
    expected = exact_attention(*(state.double() for state in (query, key, value, decay)))[
        :, :, -queries:
    ]
    assert (attended.double() - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_continued_sums(dtype):
    """Keys appended one by one, or in parts, have the same sums as all at once, even after large
    decays.
    """
    query, key, value, decay = (
        state.detach() for state in random_states(4, 2, dtype, steepness=40.0)
    )
    sums = decay_sums(decay)
    whole = append_decay(query, key, value, sums, SIZE**-0.5)
    keys, previous = [], None
    for part in (slice(0, 60), *(slice(i, i + 1) for i in range(60, 70)), slice(70, LENGTH)):
        states = (state[:, :, part] for state in (query, key, value))
        _, appended, _ = append_decay(*states, decay_sums(decay[:, :, part], previous), SIZE**-0.5)
        keys.append(appended)
        previous = appended_sums(appended[:, :, -1:], 2, SIZE**-0.5)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(
        appended_sums(torch.cat(keys, dim=2), 2, SIZE**-0.5), sums, rtol=0, atol=tolerance
    )
    scores, continued = (
        (
            whole[0].double()
            @ appended.double().repeat_interleave(2, dim=1).transpose(-1, -2)
            * SIZE**-0.5
        )
        for appended in (whole[1], torch.cat(keys, dim=2))
    )
    assert whole[1].shape[3] == SIZE + 3 * PARTS[dtype]
    torch.testing.assert_close(continued, scores, rtol=0, atol=tolerance)
    # The sums, about 3,000, are exact to 32 bits.
    expected = decay.double().cumsum(-1)
    bias = (
        scores
        - query.double() @ key.double().repeat_interleave(2, dim=1).transpose(-1, -2) * SIZE**-0.5
    )
    torch.testing.assert_close(
        bias, expected[..., :, None] - expected[..., None, :], rtol=0, atol=tolerance
    )


@pytest.mark.parametrize(
    ("method_class", "log_gate"),
    [
        (Forgetting, lambda logits: (1 / (1 + (-logits).exp())).log()),
        (Cable, lambda logits: -(1 + logits.exp()).log()),
    ],
)
def test_decay_and_gradients(method_class, log_gate):
    torch.manual_seed(0)
    method = method_class(num_heads=3, hidden_size=6)
    with torch.no_grad():
        method.gate.weight.normal_()
        method.gate.bias.normal_()
    hidden = torch.randn(2, 5, 6, requires_grad=True)
    leaves = (hidden, method.gate.weight, method.gate.bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    decay = method.decay(hidden)
    expected = log_gate(torch.einsum("bse,he->bhs", exact[0], exact[1]) + exact[2][:, None])
    torch.testing.assert_close(decay.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(decay.shape)
    gradients = torch.autograd.grad(decay, leaves, upstream)
    for gradient, exact_gradient in zip(
        gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True
    ):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        method.statistics()["gate"].double(),
        log_gate(exact[2].detach()).exp(),
        rtol=1e-5,
        atol=1e-6,
    )


def test_large_sums_in_float16():
    """The largest ones are 65,504 * 256 / sqrt(d), which is 5.9 million here."""
    query, key, value, decay = (state.detach() for state in random_states(2, 1, torch.float16))
    sums = decay_sums(decay) - 5e6
    _, appended, _ = append_decay(query, key, value, sums, SIZE**-0.5)
    torch.testing.assert_close(appended_sums(appended, 2, SIZE**-0.5), sums, rtol=2.0**-31, atol=0)


def test_the_decay_is_float32_in_a_model_of_half_precision():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert Forgetting(2, 4).to(dtype).decay(torch.randn(1, 3, 4).to(dtype)).dtype == expected


def test_both_are_the_same_functions():
    forgetting, cable = Forgetting(2, 4), Cable(2, 4)
    with torch.no_grad():
        for parameter, other in zip(forgetting.parameters(), cable.parameters(), strict=True):
            other.copy_(-parameter)
    hidden = torch.randn(1, 7, 4)
    assert torch.equal(forgetting.decay(hidden), cable.decay(hidden))


def test_initial_gates():
    method = Forgetting(4, 5000)
    assert abs(method.gate.weight.std().item() - 0.02) < 1e-3
    assert (method.statistics()["gate"] == 0.5).all()
    assert not method.shared  # each layer has its own
