"""Generation in batches: the tokens of a text recomputed from its beginning, row by row, for every method."""

import numpy as np
import pytest
import torch

from kerple.positional import primary_names
from megatron.inference.generation import Sampling, generate
from megatron.utils.errors import UserError
from tests.support.language_models import VOCABULARY, random_tokens, small_gpt

# Two of the same length, a single token, a long one.
PROMPTS = [random_tokens(length, seed=seed).tolist() for seed, length in enumerate((5, 1, 9, 5, 23))]
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11}


def one_by_one(model, prompt, row, *, maximum_tokens, temperature=0.0, top_k=0, top_p=0.0, seed=0, vocab_size=None):
    """The plain loop over one text, the whole of it through the model for each token, in float64."""
    sampling = Sampling(temperature, top_k, top_p, vocab_size)
    generator = np.random.default_rng([seed, row])
    text = list(prompt)
    for _ in range(maximum_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([text]))[:, -1]
        text += sampling.choose(logits, [generator])
    return text[len(prompt) :]


@pytest.mark.parametrize("choice", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", primary_names())
def test_batches_with_a_cache_give_what_each_text_alone_gives(method, choice):
    model = small_gpt(method).double()
    expected = [one_by_one(model, prompt, row, maximum_tokens=30, **choice) for row, prompt in enumerate(PROMPTS)]
    cached = generate(model, PROMPTS, maximum_tokens=30, **choice)
    recomputed = generate(model, PROMPTS, maximum_tokens=30, recompute=True, **choice)
    assert [generation.tokens for generation in cached] == expected
    assert [generation.tokens for generation in recomputed] == expected
    assert [generation.prompt for generation in cached] == PROMPTS
    assert len({tuple(tokens) for tokens in expected}) > 2  # the model is no constant


@pytest.mark.parametrize("batch_size", [1, 2, 3, 32])
def test_neighbours_change_nothing(batch_size):
    model = small_gpt("kerple_log").double()
    expected = [generation.tokens for generation in generate(model, PROMPTS, maximum_tokens=12, **SAMPLED)]
    found = generate(model, PROMPTS, maximum_tokens=12, batch_size=batch_size, **SAMPLED)
    assert [generation.tokens for generation in found] == expected
    first = generate(model, PROMPTS[:2], maximum_tokens=12, **SAMPLED)
    assert [generation.tokens for generation in first] == expected[:2]


def test_rows_of_the_same_prompt_differ_and_the_seed_decides():
    model = small_gpt("alibi")
    runs = [
        [generation.tokens for generation in generate(model, [[4]] * 6, maximum_tokens=20, temperature=1.0, seed=seed)]
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
    found = generate(model, [prompt], maximum_tokens=4)[0].tokens
    assert fed == [8] * 6 + [2, 1, 1, 1]
    del model.hidden
    assert found == one_by_one(model, prompt, 0, maximum_tokens=4)


def counting_up(tokens):
    """Logits of a model whose next token is always the last one plus 1."""
    return torch.nn.functional.one_hot((tokens + 1) % VOCABULARY, VOCABULARY).float()


def test_the_end_of_document_token_ends_a_row():
    found = generate(counting_up, [[3], [7], [10], [20, 30]], maximum_tokens=6, eod=10, recompute=True)
    assert [(row.tokens, row.finished) for row in found] == [
        ([4, 5, 6, 7, 8, 9], False),
        ([8, 9], True),
        ([11, 12, 13, 14, 15, 16], False),  # one in the prompt ends nothing
        ([31, 32, 33, 34, 35, 36], False),
    ]
    assert all(row.message is None and row.duration_seconds > 0 for row in found)


def test_the_end_of_document_token_may_be_a_token_like_any_other():
    found = generate(counting_up, [[7]], maximum_tokens=6, eod=10, stop_at_eod=False, recompute=True)[0]
    assert (found.tokens, found.finished) == ([8, 9, 10, 11, 12, 13], False)


def test_rows_that_end_early_leave_the_others_as_they_are():
    model = small_gpt("kerple_power_ap_ap").double()
    free = generate(model, PROMPTS, maximum_tokens=25, **SAMPLED)
    ends = free[0].tokens[3]
    stopped = generate(model, PROMPTS, maximum_tokens=25, eod=ends, **SAMPLED)
    for before, after in zip(free, stopped, strict=True):
        cut = before.tokens.index(ends) if ends in before.tokens else 25
        assert after.tokens == before.tokens[:cut]
        assert after.finished == (ends in before.tokens)
    assert stopped[0].finished


def test_results_are_given_out_as_they_come():
    seen = {}
    found = generate(
        counting_up, [[8], [1], [9]], maximum_tokens=5, eod=10, recompute=True, on_generation=seen.__setitem__
    )
    assert list(seen) == [2, 0, 1]
    assert [seen[index] for index in range(3)] == found


@pytest.mark.parametrize("recompute", [False, True])
def test_learned_positions_stop_at_the_end_of_their_table_with_a_message(recompute):
    model = small_gpt("learned", max_positions=12).double()
    prompts = [random_tokens(length).tolist() for length in (3, 10, 12, 13, 20)]
    found = generate(model, prompts, maximum_tokens=5, recompute=recompute)
    # The token after position 11 can still be predicted; it cannot be read.
    assert [len(row.tokens) for row in found] == [5, 3, 1, 0, 0]
    assert [row.message is None for row in found] == [True, False, False, False, False]
    assert not any(row.finished for row in found)
    assert all("12" in row.message for row in found[1:])
    assert found[1].tokens == one_by_one(model, prompts[1], 1, maximum_tokens=3)


def test_a_long_text_from_a_single_token():
    model = small_gpt("kerple_log").double()
    assert generate(model, [[1]], maximum_tokens=150)[0].tokens == generate(
        model, [[1]], maximum_tokens=150, recompute=True
    )[0].tokens  # fmt: skip


def test_padding_of_the_vocabulary_is_not_generated():
    model = small_gpt("none", padded_vocab_size=128)
    with torch.no_grad():
        model.output.final_linear.weight[100:] *= 100
    free = generate(model, [[1]], maximum_tokens=20, temperature=1.0)[0].tokens
    kept = generate(model, [[1]], maximum_tokens=20, temperature=1.0, vocab_size=100)[0].tokens
    assert max(free) >= 100 > max(kept)


def test_no_prompts_no_results():
    assert generate(counting_up, [], maximum_tokens=3, recompute=True) == []


def test_dropout_is_off_and_the_mode_is_kept():
    model = small_gpt("alibi", hidden_dropout=0.5)
    model.train()
    first, second = (generate(model, [[1, 2]], maximum_tokens=10)[0].tokens for _ in range(2))
    assert first == second
    assert model.training


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"maximum_tokens": 0}, "maximum_tokens must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"temperature": -1}, "temperature must be"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 70]], "vocab_size": 61}, "prompt 0 contains token id 70"),
        ({"prompts": [[1], [-2]]}, "prompt 1 contains token id -2"),
        ({"recompute": False}, "function has no KV cache of this project: generate with recompute"),
    ],
)
def test_what_cannot_be_served_is_refused(keywords, message):
    arguments = {"prompts": [[1]], "maximum_tokens": 3, "recompute": True, **keywords}
    with pytest.raises(UserError, match=message):
        generate(counting_up, arguments.pop("prompts"), **arguments)
