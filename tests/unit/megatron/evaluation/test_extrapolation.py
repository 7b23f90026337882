"""evaluate_extrapolation on this project's models, on transformers' and on plain callables."""

import copy
import math

import numpy as np
import pytest
import torch
import transformers

from kerple.attention import FULL, Span
from megatron.evaluation import evaluate_extrapolation
from megatron.utils.errors import UserError
from tests.support.language_models import VOCABULARY, AlibiByHand, direct_losses, random_tokens, small_gpt

STREAM = random_tokens(600)
LENGTHS = [8, 16, 64]


def mean_loss(model, length: int, total: int, **keywords) -> float:
    """By the definition, segment by segment, in float64."""
    found = []
    for start in range(0, total, length):
        text = STREAM[None, start : start + length + 1]
        with torch.no_grad():
            output = model(text[:, :-1], **keywords)
        found.append(direct_losses(getattr(output, "logits", output), text[:, 1:]))
    return torch.cat(found).mean().item()


@pytest.mark.parametrize("method", ["kerple_log", "alibi", "rotary", "rpe", "sinusoidal", "kerple_power_ap_ap"])
def test_losses_of_a_model(method):
    model = small_gpt(method)
    spans = {"full": FULL, "window@5": Span(window=5), "blockwise": Span(block=4), "blockwise@10": Span(block=5)}
    rows = evaluate_extrapolation(
        model,
        STREAM,
        LENGTHS,
        modes=list(spans),
        query_chunk=16,
        batch_tokens=100,
        progress=False,
        pos_emb=method,
        seed=3,
        train_length=8,
    )
    exact = copy.deepcopy(model).double()
    assert [(row["mode"], row["length"]) for row in rows] == [(mode, n) for mode in spans for n in LENGTHS]
    for row in rows:
        span = spans[row["mode"]]
        assert row["loss"] == pytest.approx(mean_loss(exact, row["length"], 576, span=span), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["tokens"] == 576
        assert (row["pos_emb"], row["seed"], row["train_length"], row["note"]) == (method, 3, 8, None)
        assert row["protocol"] == "non-overlapping"


def test_a_token_budget_limits_every_length_alike():
    model = AlibiByHand()
    rows = evaluate_extrapolation(model, STREAM, LENGTHS, token_budget=200, progress=False)
    assert [row["tokens"] for row in rows] == [192, 192, 192]
    for row in rows:
        assert row["loss"] == pytest.approx(mean_loss(model, row["length"], 192), abs=1e-12)


@pytest.mark.parametrize("convert", [list, lambda t: t.numpy().astype(np.uint16), lambda t: t.to(torch.int32)])
def test_tokens_may_be_a_list_or_an_array(convert):
    rows = evaluate_extrapolation(AlibiByHand(), convert(STREAM), [64], progress=False)
    assert rows == evaluate_extrapolation(AlibiByHand(), STREAM, [64], progress=False)


def test_a_plain_function_is_enough():
    def uniform(tokens):
        return torch.zeros(*tokens.shape, 100)

    rows = evaluate_extrapolation(uniform, STREAM, [10, 20], progress=False)
    assert [row["perplexity"] for row in rows] == [pytest.approx(100), pytest.approx(100)]
    assert rows[0]["pos_emb"] is None


def test_padded_vocabulary_entries_take_part_in_the_softmax():
    """61 tokens and 3 padded entries, all equally likely: each has 1/64, as in training."""
    rows = evaluate_extrapolation(
        lambda tokens: torch.zeros(*tokens.shape, 64), STREAM, [10], vocab_size=VOCABULARY, progress=False
    )
    assert rows[0]["perplexity"] == pytest.approx(64)


def gpt_neox() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config).eval()


def test_a_transformers_model_is_fed_in_chunks():
    model = gpt_neox()
    fed = []
    model.register_forward_pre_hook(
        lambda _, arguments, keywords: fed.append((arguments[0] if arguments else keywords["input_ids"]).shape[1]),
        with_kwargs=True,
    )
    rows = evaluate_extrapolation(model, STREAM, LENGTHS, query_chunk=24, progress=False)
    assert max(fed) == 24
    exact = copy.deepcopy(model).double()
    for row in rows:
        assert row["loss"] == pytest.approx(mean_loss(exact, row["length"], 576), abs=1e-5)


def test_a_transformers_model_with_a_table_of_positions_stops_at_its_end():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    rows = evaluate_extrapolation(model, STREAM, [8, 16, 32], query_chunk=8, progress=False)
    assert [row["loss"] is None for row in rows] == [False, False, True]
    assert "table of 16 positions" in rows[2]["note"]


def test_lengths_beyond_a_learned_table_are_not_available_and_the_rest_goes_on():
    model = small_gpt("learned", max_positions=16)
    rows = evaluate_extrapolation(model, STREAM, [64, 16, 8], modes=["full", "window@4"], query_chunk=8, progress=False)
    beyond = [row for row in rows if row["length"] == 64]
    within = [row for row in rows if row["length"] != 64]
    assert len(beyond) == 2
    assert all(row["loss"] is None and row["perplexity"] is None and row["tokens"] == 0 for row in beyond)
    assert all("16" in row["note"] for row in beyond)
    assert all(row["loss"] > 0 and row["tokens"] == 576 for row in within)


def test_rows_are_given_out_as_they_come():
    seen = []

    def model(tokens):
        if tokens.shape[1] == 16:
            raise KeyboardInterrupt
        return torch.zeros(*tokens.shape, VOCABULARY)

    with pytest.raises(KeyboardInterrupt):
        evaluate_extrapolation(model, STREAM, [4, 8, 16], progress=False, on_record=seen.append)
    assert [row["length"] for row in seen] == [4, 8]


def test_the_model_is_left_as_it_was():
    model = small_gpt("alibi", hidden_dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    first = evaluate_extrapolation(model, STREAM, [16], progress=False)
    assert [module.training for module in model.modules()] == modes
    assert first == evaluate_extrapolation(model, STREAM, [16], progress=False)  # no dropout while evaluating
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_is_no_number_is_not_reported_as_one():
    rows = evaluate_extrapolation(
        lambda tokens: torch.full((*tokens.shape, VOCABULARY), torch.nan), STREAM, [16], progress=False
    )
    assert rows[0]["loss"] is None
    assert rows[0]["note"] == "the loss is nan"


def test_a_perplexity_beyond_a_float_keeps_its_loss():
    def confident(tokens):  # certain of token 0 at every position
        return torch.nn.functional.one_hot(torch.zeros_like(tokens), VOCABULARY) * 1e6

    row = evaluate_extrapolation(confident, STREAM, [16], progress=False)[0]
    assert row["loss"] > 1e5
    assert row["perplexity"] is None


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lengths": []}, "no lengths"),
        ({"lengths": [0, 4]}, "a length must be at least 1 token, not 0"),
        ({"lengths": [1024]}, "600 tokens hold no segment of 1,024"),
        ({"modes": ["window@4"]}, "window@4 needs a model with a `window` argument; uniform has none"),
        ({"modes": ["blockwise@8"]}, "blockwise@8 needs a model with a `block` argument; uniform has none"),
        ({"modes": ["blockwise"]}, "blockwise takes its blocks from the training length, which is not known here"),
        ({"modes": ["sliding"]}, "'sliding' is not known"),
        ({"protocols": ["everything"]}, "'everything' is not known"),
        ({"query_chunk": 0}, "query_chunk must be at least 1"),
        ({"batch_tokens": -1}, "batch_tokens must be at least 1"),
        ({"token_budget": 0}, "token_budget must be at least 1"),
        ({"vocab_size": 50}, "token id 60 is outside the vocabulary of 50"),
        ({"tokens": STREAM - 1}, "token id -1 is outside"),
        ({"tokens": STREAM[None]}, "vector of integers"),
        ({"tokens": STREAM.float()}, "vector of integers, not torch.float32"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(keywords, message):
    def uniform(tokens):
        raise AssertionError("the model was run")

    arguments = {"tokens": STREAM, "lengths": [16], "progress": False, **keywords}
    with pytest.raises(UserError, match=message):
        evaluate_extrapolation(uniform, arguments.pop("tokens"), arguments.pop("lengths"), **arguments)


def test_a_model_that_returns_no_logits_is_refused():
    with pytest.raises(TypeError, match="must return logits"):
        evaluate_extrapolation(lambda tokens: tokens, STREAM, [16], progress=False)


def test_progress_is_one_line_per_row_where_there_is_no_terminal(capfd):
    evaluate_extrapolation(small_gpt("learned", max_positions=16), STREAM, [16, 32], pos_emb="learned")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("learned full non-overlapping at 16: perplexity ")
    assert "tokens/s" in lines[0]
    assert lines[1].startswith("learned full non-overlapping at 32: n/a: ")
