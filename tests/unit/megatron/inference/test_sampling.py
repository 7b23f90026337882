"""Choosing tokens: against the definitions of temperature, top-k and top-p, and the frequencies they promise."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.inference.generation import Sampling
from megatron.utils.errors import UserError


def by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution over ids for one row of logits without ties, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    weights = {token: np.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    total = sum(weights.values())
    kept, held = [], 0.0
    for token in order:
        kept.append(token)
        held += weights[token] / total
        if 0 < top_p < 1 and held >= top_p:
            break
    share = sum(weights[token] for token in kept)
    return np.array([weights[token] / share if token in kept else 0.0 for token in range(len(logits))])


def distribution(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    chances, ids = sampling.probabilities(logits)
    return torch.zeros(logits.shape, dtype=torch.float64).scatter(1, ids, chances)


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 25),
    top_p=st.floats(0, 1),
)
def test_distribution_equals_its_definition(seed, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(3, 20)) * 3
    found = distribution(Sampling(temperature, top_k, top_p), torch.tensor(logits))
    for row in range(3):
        np.testing.assert_allclose(found[row], by_definition(logits[row], temperature, top_k, top_p), atol=1e-9)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 0.0), (0.7, 5, 0.0), (1.3, 0, 0.8), (1.0, 6, 0.9)]
)
def test_frequencies(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    draws = 20_000
    generators = [np.random.default_rng([5, row]) for row in range(draws)]
    counts = np.bincount(sampling.choose(logits.expand(draws, -1), generators), minlength=12)
    expected = by_definition(logits[0].double().numpy(), temperature, top_k, top_p)
    assert (counts[expected == 0] == 0).all()
    seen = expected > 0
    assert scipy.stats.chisquare(counts[seen], expected[seen] * draws).pvalue > 1e-4


def test_temperature_zero_takes_the_most_probable():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert Sampling().choose(logits, [None, None]) == [1, 0]


def test_a_very_small_temperature_is_nearly_greedy_and_does_not_overflow():
    logits = torch.tensor([[50.0, 49.0, -80.0]])
    assert distribution(Sampling(temperature=1e-300), logits).tolist() == [[1.0, 0.0, 0.0]]


def test_top_p_keeps_the_most_probable_token_even_when_it_alone_holds_more():
    assert distribution(Sampling(1.0, top_p=1e-9), torch.tensor([[0.0, 1.0, 0.5]])).tolist() == [[0.0, 1.0, 0.0]]


def test_the_padding_of_the_vocabulary_is_never_drawn():
    logits = torch.tensor([[0.0, 1.0, 90.0, 95.0]])
    assert Sampling(vocab_size=2).choose(logits, [None]) == [1]
    drawn = Sampling(5.0, vocab_size=2).choose(
        logits.expand(500, -1), [np.random.default_rng(row) for row in range(500)]
    )
    assert set(drawn) == {0, 1}


class Fixed:
    """A generator that always gives the same draw."""

    def __init__(self, draw: float):
        self.draw = draw

    def random(self) -> float:
        return self.draw


def test_the_ends_of_the_unit_interval_choose_kept_tokens():
    logits = torch.tensor([[0.3, 0.2, 0.1, -9.0]])
    sampling = Sampling(1.0, top_k=3)
    assert sampling.choose(logits, [Fixed(0.0)]) == [0]
    assert sampling.choose(logits, [Fixed(np.nextafter(1.0, 0.0))]) == [2]
    nucleus = Sampling(1.0, top_p=0.5)
    assert nucleus.choose(logits, [Fixed(np.nextafter(1.0, 0.0))]) == [1]


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="logits are NaN"):
        Sampling().choose(torch.tensor([[0.0, float("nan")]]), [None])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0"),
        ({"temperature": float("inf")}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"top_p": 1.5}, "top_p must be between"),
        ({"top_p": -0.5}, "top_p must be between"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(UserError, match=message):
        Sampling(**values)
