"""Generation in batches gives the same texts as one at a time; sampling follows its definition."""

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kerple.attention import FULL, AttentionMode, DynamicNtk, Span
from kerple.positional.distance_maps import Clip, Linear
from megatron.inference.generation import Sampling, generate
from megatron.model.cache import KVCache
from megatron.model.gpt import GPT
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected
from tests.support.language_models import VOCABULARY, random_tokens, small_gpt

# Two of the same length, a single token, a long one.
PROMPTS = [
    random_tokens(length, seed=seed).tolist() for seed, length in enumerate((5, 1, 9, 5, 23))
]
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11}


def one_by_one(
    model,
    prompt,
    row,
    *,
    maximum_tokens,
    temperature=0.0,
    top_k=0,
    top_p=0.0,
    seed=0,
    vocab_size=None,
):
    """A plain loop over one text that recomputes all of it for each token."""
    sampling = Sampling(temperature, top_k, top_p, vocab_size)
    generator = np.random.default_rng([seed, row])
    text = list(prompt)
    for _ in range(maximum_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([text]))[:, -1]
        text += sampling.choose(logits, [generator])
    return text[len(prompt) :]


@pytest.mark.parametrize("method", ["kerple_log", "xpos", "forgetting", "fire"])
@pytest.mark.quick(1)
def test_batches_with_a_cache_give_the_same_texts_as_one_at_a_time(method):
    model = small_gpt(method).double()
    expected = [
        one_by_one(model, prompt, row, maximum_tokens=20, **SAMPLED)
        for row, prompt in enumerate(PROMPTS)
    ]
    cached = generate(model, PROMPTS, maximum_tokens=20, **SAMPLED)
    recomputed = generate(model, PROMPTS, maximum_tokens=20, recompute=True, **SAMPLED)
    assert [generation.tokens for generation in cached] == expected
    assert [generation.tokens for generation in recomputed] == expected
    assert [generation.prompt for generation in cached] == PROMPTS
    assert len({tuple(tokens) for tokens in expected}) > 2  # the model is not constant


def test_dynamic_scaling_needs_the_complete_text():
    options = {"scaling": "dynamic", "factor": 2, "trained_length": 16}
    model = small_gpt("rotary", pos_emb_options=options).double()
    assert_rejected(
        r"pos_emb rotary \(scaling dynamic.*recompute", generate, model, PROMPTS, maximum_tokens=20
    )
    expected = [
        one_by_one(model, prompt, row, maximum_tokens=20) for row, prompt in enumerate(PROMPTS)
    ]
    recomputed = generate(model, PROMPTS, maximum_tokens=20, recompute=True)
    assert [generation.tokens for generation in recomputed] == expected


@pytest.mark.parametrize("batch_size", [1, 3])
def test_results_do_not_depend_on_the_batch(batch_size):
    model = small_gpt("kerple_log").double()
    expected = [
        generation.tokens for generation in generate(model, PROMPTS, maximum_tokens=12, **SAMPLED)
    ]
    results = generate(model, PROMPTS, maximum_tokens=12, batch_size=batch_size, **SAMPLED)
    assert [generation.tokens for generation in results] == expected
    first = generate(model, PROMPTS[:2], maximum_tokens=12, **SAMPLED)
    assert [generation.tokens for generation in first] == expected[:2]


def test_rows_of_the_same_prompt_differ_and_depend_on_the_seed():
    model = small_gpt("alibi")
    runs = [
        [
            generation.tokens
            for generation in generate(
                model, [[4]] * 6, maximum_tokens=20, temperature=1.0, seed=seed
            )
        ]
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert not {tuple(row) for row in runs[0]} & {tuple(row) for row in runs[2]}
    assert len({tuple(row) for row in runs[0]}) == 6


def test_long_prompts_are_fed_in_chunks(monkeypatch):
    monkeypatch.setattr("megatron.inference.generation.PROMPT_CHUNK", 8)
    model = small_gpt("rotary").double()
    fed = []
    hidden = model.hidden

    def recorded(tokens, *arguments):
        fed.append(tokens.shape[1])
        return hidden(tokens, *arguments)

    model.hidden = recorded
    prompt = random_tokens(50).tolist()
    results = generate(model, [prompt], maximum_tokens=4)[0].tokens
    assert fed == [8] * 6 + [2, 1, 1, 1]
    del model.hidden
    assert results == one_by_one(model, prompt, 0, maximum_tokens=4)


def counting_up(tokens):
    """Logits of a model whose next token is always the last one plus 1."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCABULARY, VOCABULARY).float()


def test_the_end_of_document_token_ends_a_row():
    results = generate(
        counting_up, [[3], [7], [10], [20, 30]], maximum_tokens=6, eod=10, recompute=True
    )
    assert [(row.tokens, row.finished) for row in results] == [
        ([4, 5, 6, 7, 8, 9], False),
        ([8, 9], True),
        ([11, 12, 13, 14, 15, 16], False),  # in the prompt, it has no effect
        ([31, 32, 33, 34, 35, 36], False),
    ]
    assert all(row.message is None and row.duration_seconds > 0 for row in results)


def test_rows_that_end_early_do_not_change_the_others():
    model = small_gpt("kerple_power_ap_ap").double()
    free = generate(model, PROMPTS, maximum_tokens=25, **SAMPLED)
    ends = free[0].tokens[3]
    stopped = generate(model, PROMPTS, maximum_tokens=25, eod=ends, **SAMPLED)
    for before, after in zip(free, stopped, strict=True):
        cut = before.tokens.index(ends) if ends in before.tokens else 25
        assert after.tokens == before.tokens[:cut]
        assert after.finished == (ends in before.tokens)
    assert stopped[0].finished


def test_results_are_reported_when_they_are_complete():
    reported = {}
    results = generate(
        counting_up,
        [[8], [1], [9]],
        maximum_tokens=5,
        eod=10,
        recompute=True,
        on_generation=reported.__setitem__,
    )
    assert list(reported) == [2, 0, 1]
    assert [reported[index] for index in range(3)] == results


@pytest.mark.parametrize("recompute", [False, True])
def test_learned_positions_stop_at_the_end_of_their_table_with_a_message(recompute):
    model = small_gpt("learned", max_positions=12).double()
    prompts = [random_tokens(length).tolist() for length in (3, 10, 12, 13, 20)]
    results = generate(model, prompts, maximum_tokens=5, recompute=recompute)
    # The token after position 11 can still be predicted; it cannot be read.
    assert [len(row.tokens) for row in results] == [5, 3, 1, 0, 0]
    assert [row.message is None for row in results] == [True, False, False, False, False]
    assert not any(row.finished for row in results)
    assert all("12" in row.message for row in results[1:])
    assert results[1].tokens == one_by_one(model, prompts[1], 1, maximum_tokens=3)


def test_dropout_is_off_and_the_mode_is_restored():
    model = small_gpt("alibi", hidden_dropout=0.5)
    model.train()
    first, second = (generate(model, [[1, 2]], maximum_tokens=10)[0].tokens for _ in range(2))
    assert first == second
    assert model.training


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"maximum_tokens": 0}, "maximum_tokens.*1"),
        ({"seed": -1}, "seed.*0"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 70]], "vocab_size": 61}, "prompt 0 contains token id 70"),
        ({"prompts": [[1], [-2]]}, "prompt 1 contains token id -2"),
        ({"temperature": -0.1}, "temperature.*0"),
        ({"top_k": -1}, "top_k.*0"),
        ({"top_p": 1.5}, "top_p"),
        ({"recompute": False}, "function is not a model of this project, so its KV cache"),
    ],
)
def test_invalid_arguments(keywords, message):
    arguments = {"prompts": [[1]], "maximum_tokens": 3, "recompute": True, **keywords}
    assert_rejected(message, generate, counting_up, arguments.pop("prompts"), **arguments)


def test_a_prompt_beyond_the_embedding():
    with pytest.raises(UserError, match=f"token id {VOCABULARY}"):
        generate(small_gpt("none"), [[VOCABULARY]], maximum_tokens=2)


# -- sampling


def by_definition(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution over ids for one row of logits without ties, one token at a time."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    weights = {token: np.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    total = sum(weights.values())
    nucleus, total_probability = [], 0.0
    for token in order:
        nucleus.append(token)
        total_probability += weights[token] / total
        if 0 < top_p < 1 and total_probability >= top_p:
            break
    share = sum(weights[token] for token in nucleus)
    return np.array(
        [weights[token] / share if token in nucleus else 0.0 for token in range(len(logits))]
    )


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
    results = distribution(Sampling(temperature, top_k, top_p), torch.tensor(logits))
    for row in range(3):
        np.testing.assert_allclose(
            results[row], by_definition(logits[row], temperature, top_k, top_p), atol=1e-9
        )


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 5, 0.0), (1.3, 0, 0.8)])
def test_frequencies(temperature, top_k, top_p):
    sampling = Sampling(temperature, top_k, top_p)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    draws = 5000
    generators = [np.random.default_rng([5, row]) for row in range(draws)]
    counts = np.bincount(sampling.choose(logits.expand(draws, -1), generators), minlength=12)
    expected = by_definition(logits[0].double().numpy(), temperature, top_k, top_p)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert scipy.stats.chisquare(counts[possible], expected[possible] * draws).pvalue > 1e-4


def test_temperature_zero_chooses_the_most_probable():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert Sampling().choose(logits, [None, None]) == [1, 0]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.7}])
def test_temperature_zero_with_top_k_or_top_p_is_one(options):
    """As in GPT-NeoX."""
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    expected = distribution(Sampling(temperature=1.0, **options), logits)
    assert distribution(Sampling(**options), logits).tolist() == expected.tolist()


def test_a_very_small_temperature_is_nearly_greedy_and_does_not_overflow():
    logits = torch.tensor([[50.0, 49.0, -80.0]])
    assert distribution(Sampling(temperature=1e-300), logits).tolist() == [[1.0, 0.0, 0.0]]


def test_top_p_keeps_the_most_probable_token_even_if_its_probability_exceeds_top_p():
    assert distribution(Sampling(1.0, top_p=1e-9), torch.tensor([[0.0, 1.0, 0.5]])).tolist() == [
        [0.0, 1.0, 0.0]
    ]


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


def test_the_ends_of_the_unit_interval_choose_remaining_tokens():
    logits = torch.tensor([[0.3, 0.2, 0.1, -9.0]])
    sampling = Sampling(1.0, top_k=3)
    assert sampling.choose(logits, [Fixed(0.0)]) == [0]
    assert sampling.choose(logits, [Fixed(np.nextafter(1.0, 0.0))]) == [2]
    nucleus = Sampling(1.0, top_p=0.5)
    assert nucleus.choose(logits, [Fixed(np.nextafter(1.0, 0.0))]) == [1]


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(logit, temperature):
    with pytest.raises(UserError, match="logits are NaN or infinite"):
        Sampling(temperature).choose(torch.tensor([[0.0, logit]]), [None])
    assert Sampling(temperature).choose(
        torch.tensor([[0.0, -torch.inf]]), [np.random.default_rng(0)]
    ) == [0]


SINKS = Span(window=6, sinks=2)
MODES = [
    ("kerple_log", AttentionMode(SINKS, reindexed=True)),
    ("rotary", AttentionMode(distance_map=Linear(16), dynamic_ntk=DynamicNtk(1.0, 16))),
    ("dape_kerple", AttentionMode(SINKS)),
    ("rotary", AttentionMode(SINKS, distance_map=Clip(3))),
]


@pytest.mark.parametrize(("method", "mode"), MODES)
@pytest.mark.quick(2)
def test_modes_with_a_cache_give_the_tokens_of_the_complete_text(method, mode):
    model = small_gpt(method).double()
    cached = generate(model, PROMPTS, maximum_tokens=20, mode=mode, **SAMPLED)
    recomputed = generate(model, PROMPTS, maximum_tokens=20, recompute=True, mode=mode, **SAMPLED)
    assert [generation.tokens for generation in cached] == [
        generation.tokens for generation in recomputed
    ]
    plain = generate(model, PROMPTS, maximum_tokens=20, **SAMPLED)
    assert [generation.tokens for generation in cached] != [
        generation.tokens for generation in plain
    ]


BOUNDED = ("kerple_log", pytest.param("dape_v2_kerple", marks=pytest.mark.ci))


@pytest.mark.parametrize("tokens", [120, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", BOUNDED)
def test_a_cache_with_sinks_is_bounded(method, tokens, monkeypatch):
    """The same tokens as with all keys in memory and the same mask, with a cache of
    constant size.
    """
    model, mode = small_gpt(method, num_layers=1).double(), AttentionMode(Span(window=12, sinks=4))
    caches, sizes = [], []
    new_cache, hidden = GPT.new_cache, GPT.hidden

    def recorded_cache(*arguments):
        caches.append(new_cache(*arguments))
        return caches[-1]

    def recorded_hidden(*arguments):
        result = hidden(*arguments)
        sizes.append(
            sum(
                part.numel()
                for layer in caches[-1].layers
                for part in (*layer._buffers, *layer._sinks)
            )
        )
        return result

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "new_cache", recorded_cache)
        patch.setattr(GPT, "hidden", recorded_hidden)
        bounded = generate(model, PROMPTS[-1:], maximum_tokens=tokens, mode=mode, **SAMPLED)[0]
    assert len(sizes) == tokens
    heads_and_size = 2 * model.settings.config.hidden_size
    assert max(sizes[30:]) == min(sizes[30:]) <= heads_and_size * (len(PROMPTS[-1]) + 12 + 4)
    monkeypatch.setattr(GPT, "new_cache", lambda *_: KVCache([FULL]))
    assert (
        bounded.tokens
        == generate(model, PROMPTS[-1:], maximum_tokens=tokens, mode=mode, **SAMPLED)[0].tokens
    )


def test_modes_that_a_method_does_not_support():
    with pytest.raises(UserError, match=r"inference mode.*pos_emb none"):
        generate(
            small_gpt("none"), PROMPTS, maximum_tokens=2, mode=AttentionMode(distance_map=Clip(3))
        )
