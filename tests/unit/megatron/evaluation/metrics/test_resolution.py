"""Attention resolution, compared with a sum over all pairs in float64."""

import copy
import itertools
import math

import pytest
import torch

from kerple.attention import FULL, AttentionMode, Span
from kerple.positional import ModelShape, build
from megatron.evaluation.metrics.resolution import plan_resolution, sum_by_distance
from megatron.evaluation.records import Provenance
from megatron.evaluation.runner import run_eval_tasks
from megatron.evaluation.text import Text
from tests.support.attention import dense_scores, visible_pairs
from tests.support.errors import assert_rejected
from tests.support.language_models import random_tokens, small_gpt, with_repeated_heads

STREAM = random_tokens(200)
LENGTH = 48
SPANS = {"full": FULL, "window@9": Span(window=9), "blockwise@16": Span(block=8)}


def measure(model, modes, *, texts=2, **sizes):
    tasks = plan_resolution(Text(STREAM), [LENGTH], modes, texts, Provenance())
    return run_eval_tasks(model, tasks, progress=False, **sizes)


def scores_of(model, layer, tokens, span):
    """The final scores of all pairs, `[h, s, s]`, from the layer's own inputs; those of masked
    pairs are arbitrary.
    """
    inputs = []
    attention = model.blocks[layer].attention
    hook = attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.hidden(tokens[None], mode=AttentionMode(span))
    hook.remove()
    heads, size = model.settings.config.num_attention_heads, model.settings.config.head_size
    query, key, _ = (
        attention.query_key_value(inputs[0]).view(1, LENGTH, heads, 3, size).permute(3, 0, 2, 1, 4)
    )
    method = getattr(attention, "rpe", None) or build(
        "none", ModelShape(heads, size, heads * size, 1, LENGTH)
    )
    positions, sums = torch.arange(LENGTH), None
    query, key = method.rotate(query, key, positions, positions)
    if "decay" in method.hooks:
        sums = method.decay(inputs[0]).cumsum(-1)
    return dense_scores(method, query, key, ~visible_pairs(LENGTH, span), sums)[0]


def resolution_by_hand(scores, span):
    """LEX's equations 3 and 4 for one head's scores `[s, s]`."""
    by_pair, visible = {}, visible_pairs(LENGTH, span)
    for query in range(LENGTH):
        for key in range(query + 1):
            if visible[query, key]:
                by_pair.setdefault(query - key, []).append(float(scores[query, key]))
    s = [math.fsum(by_pair[n]) / len(by_pair[n]) for n in range(len(by_pair))]
    total = sum(math.exp(mean) for mean in s[:-1])
    weights = [math.exp(mean) for mean in s]
    changes = [near * (near - far) for near, far in itertools.pairwise(weights)]
    return sum(changes) / total**2


@pytest.mark.parametrize("method", ["kerple_log", "dape_kerple"])
@torch.no_grad()
def test_of_grouped_heads(method):
    model = small_gpt(method, num_kv_heads=1)
    names = ["full", "window@9", "blockwise@16"]
    for grouped, repeated in zip(
        measure(model, names), measure(with_repeated_heads(model), names), strict=True
    ):
        assert grouped["resolution"] == pytest.approx(repeated["resolution"], rel=1e-5)


@pytest.mark.parametrize(
    "method", ["kerple_log", "kerple_power_ap_ap", "xpos", "dape_kerple", "learned", "forgetting"]
)
@torch.no_grad()
@pytest.mark.quick(3)
def test_against_every_pair(method):
    """In chunks of 20 through the cache, two texts in a batch."""
    model = small_gpt(method)
    records = measure(model, list(SPANS), query_chunk=20)
    exact = copy.deepcopy(model).double()
    for record, (mode, span) in zip(records, SPANS.items(), strict=True):
        known = {key: record[key] for key in ("kind", "mode", "protocol", "texts")}
        assert known == {"kind": "resolution", "mode": mode, "protocol": "first@2", "texts": 2}
        assert record["resolution"] == pytest.approx(sum(record["layers"]) / 2)
        for layer, value in enumerate(record["layers"]):
            expected = [
                resolution_by_hand(head, span)
                for text in STREAM[: 2 * LENGTH].view(2, LENGTH)
                for head in scores_of(exact, layer, text, span)
            ]
            assert value == pytest.approx(sum(expected) / len(expected), abs=1e-5)


@pytest.mark.parametrize(
    ("method", "mode", "options"),
    [
        ("alibi", "full", {}),
        ("fire", "window@9", {"threshold": 5.0}),
        ("xpos", "window@9", {"random_range": 200, "random_length": LENGTH, "scale_base": 8}),
    ],
)
def test_chunks_and_batches_do_not_change_the_result_or_the_model(method, mode, options):
    """FIRE's scores beyond the threshold and sampled positions depend on the number of keys that
    were dropped.
    """
    model = small_gpt(method, pos_emb_options=options)
    attentions = [block.attention.attention for block in model.blocks]
    in_one_call, in_chunks = (
        measure(model, [mode], **sizes)[0]["layers"]
        for sizes in ({}, {"query_chunk": 7, "batch_tokens": 1})
    )
    assert in_one_call == pytest.approx(in_chunks, rel=1e-5)
    assert [block.attention.attention for block in model.blocks] == attentions


def test_sums_along_the_diagonals():
    values = torch.arange(15.0).view(3, 5)  # queries at 2, 3, 4 of 5 positions
    assert sum_by_distance(values).tolist() == [2 + 8 + 14, 1 + 7 + 13, 0 + 6 + 12, 5 + 11, 10]


def test_without_a_resolution():
    beyond = measure(small_gpt("learned", max_positions=16), ["full"])[0]
    assert (beyond["resolution"], beyond["layers"], beyond["texts"]) == (None, [], 0)
    assert "16" in beyond["note"]
    assert "fewer than two distances" in measure(small_gpt("alibi"), ["window@1"])[0]["note"]
    assert_rejected(r"--resolution 9.*4.*48", measure, small_gpt("alibi"), ["full"], texts=9)
