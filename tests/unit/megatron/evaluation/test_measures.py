"""Every protocol and measure against a slow float64 computation, and statistics against scipy."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch

from kerple.attention import Span
from megatron.evaluation import evaluate_extrapolation
from megatron.evaluation.loss_accumulator import standard_error
from megatron.evaluation.protocols import parse_protocol
from megatron.evaluation.text import Text
from megatron.tokenizer import CharLevelTokenizer
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.utils.errors import UserError
from tests.support.language_models import VOCABULARY, direct_losses, random_tokens, small_gpt

STREAM = random_tokens(700)
OFFSETS = np.array([0, 100, 101, 250, 430, 700])
BYTES = np.arange(VOCABULARY) % 5
SPANS = {"full": {}, "window@6": {"window": 6}, "blockwise@16": {"block": 8}}


def targets_of(protocol, length, longest):
    """(first input, target) pairs by the protocol's definition: one for each scored token."""
    last = len(STREAM) - 1
    pairs = []
    if protocol == "non-overlapping":
        for start in range(0, last // longest * longest, length):
            pairs += [(start, start + i + 1) for i in range(length)]
    if protocol == "kerple@5":
        for segment in range(5):
            pairs += [(segment * length, segment * length + i + 1) for i in range(length)]
    if protocol == "last-k@8":
        for end in range(longest, last + 1, longest):
            pairs += [(end - length, target) for target in range(end - 7, end + 1)]
    if protocol == "sliding@8":
        for end in range(longest, last + 1, 8):
            pairs += [(end - length, target) for target in range(end - 7, end + 1)]
    return pairs


def direct(model, protocol, length, longest, span):
    """Target -> loss, one call per segment, in float64."""
    losses = []
    by_start = {}
    for start, target in targets_of(protocol, length, longest):
        by_start.setdefault(start, []).append(target)
    with torch.no_grad():
        for start, targets in by_start.items():
            text = STREAM[None, start : start + length + 1]
            found = direct_losses(model(text[:, :-1], span=Span(**span)), text[:, 1:])[0]
            losses += [(target, target - start - 1, float(found[target - start - 1])) for target in targets]
    return losses


@pytest.mark.parametrize("mode", SPANS)
@pytest.mark.parametrize("protocol", ["non-overlapping", "kerple@5", "last-k@8", "sliding@8"])
def test_protocols_and_modes_equal_a_direct_computation(protocol, mode):
    model = small_gpt("kerple_log")
    exact = copy.deepcopy(model).double()
    records = []
    text = Text(STREAM, OFFSETS, token_bytes=BYTES)
    lengths = [16, 64]
    rows = evaluate_extrapolation(
        model,
        text,
        lengths,
        modes=[mode],
        protocols=[protocol],
        position_bins=4,
        query_chunk=16,
        batch_tokens=100,
        progress=False,
        on_record=records.append,
    )
    for row, length in zip(rows, lengths, strict=True):
        scored = direct(exact, protocol, length, 64, SPANS[mode])
        losses = np.array([loss for _, _, loss in scored])
        assert (row["protocol"], row["mode"], row["tokens"]) == (protocol, mode, len(scored))
        assert row["loss"] == pytest.approx(losses.mean(), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
        length_in_bytes = sum(BYTES[STREAM[target]] for target, _, _ in scored)
        assert row["bits_per_byte"] == pytest.approx(losses.sum() / math.log(2) / length_in_bytes, rel=1e-5)
        of_document = np.searchsorted(OFFSETS, [target for target, _, _ in scored], side="right") - 1
        assert row["documents"] == len(set(of_document))
        # The error of a ratio of sums, by the textbook: residuals of the documents' sums.
        sums = [losses[of_document == one].sum() for one in sorted(set(of_document))]
        counts = [int((of_document == one).sum()) for one in sorted(set(of_document))]
        residuals = [total - losses.mean() * count for total, count in zip(sums, counts, strict=True)]
        if len(sums) > 1:
            expected = math.sqrt(len(sums) / (len(sums) - 1) * sum(r * r for r in residuals)) / sum(counts)
            assert row["stderr"] == pytest.approx(expected, rel=1e-3)
        else:
            assert row["stderr"] is None
        positions = next(one for one in records if one["kind"] == "positions" and one["length"] == length)
        where = np.array([position for _, position, _ in scored])
        for i, (low, high) in enumerate(zip(positions["edges"], positions["edges"][1:], strict=False)):
            inside = (where >= low) & (where < high)
            assert positions["counts"][i] == inside.sum() > 0
            assert positions["losses"][i] == pytest.approx(losses[inside].mean(), abs=1e-5)
        assert sum(positions["counts"]) == len(scored)


def test_equal_documents_give_the_standard_error_of_their_mean():
    means = np.random.default_rng(3).normal(3, 0.4, 12)
    expected = scipy.stats.sem(means)
    assert standard_error(means * 50, np.full(12, 50)) == pytest.approx(expected)
    assert standard_error(means[:1] * 50, np.full(1, 50)) is None


def test_the_same_targets_at_every_length():
    for name in ("non-overlapping", "last-k@8", "sliding@8"):
        found = [
            sorted(start + position + 1 for start in part.starts for position in range(part.first, part.length))
            for part in parse_protocol(name).plan(700, [16, 32, 64], 200)
        ]
        assert found[0] == found[1] == found[2]
        assert 0 < len(found[0]) <= 200
        assert len(set(found[0])) == len(found[0])


def test_rows_by_document_are_not_crossed():
    for name in ("non-overlapping", "last-k@8"):
        for part in parse_protocol(name).plan_rows(7, [16, 64], None):
            for start in part.starts:
                assert start // 65 == (start + part.length) // 65
            assert {start // 65 for start in part.starts} == set(range(7))


@pytest.mark.parametrize(
    ("name", "available", "lengths", "message"),
    [
        ("kerple", 1000, [8], "the text holds 124 segments of 8 tokens; .* choose kerple@124"),
        ("last-k", 9000, [128, 512], "more than a length of 128 has; choose last-k@128"),
        ("sliding@9", 1000, [8], "more than a length of 8"),
        ("last-k@8", 64, [64], "64 tokens hold no segment of 64"),
        ("last-k@0", 64, [64], "not known"),
        ("non-overlapping@3", 64, [64], "not known"),
    ],
)
def test_what_a_protocol_refuses(name, available, lengths, message):
    with pytest.raises(UserError, match=message):
        parse_protocol(name).plan(available, lengths, None)


def test_a_protocol_of_one_stream_refuses_documents():
    with pytest.raises(UserError, match="kerple@320 reads one stream"):
        parse_protocol("kerple").plan_rows(3, [8], None)
    with pytest.raises(UserError, match="a budget of 10 tokens is less than the 64 of one text"):
        parse_protocol("non-overlapping").plan_rows(3, [64], 10)


def test_characters_count_their_bytes():
    tokenizer = CharLevelTokenizer()
    text = "naïve ∑ text\n"
    ids = tokenizer.tokenize(text)
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.byte_lengths()[tokenizer.eod] == 0


TEXTS = ("naïve café – “∑” 東京 🙂\n", "plain ASCII text, ")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The path of a byte-level BPE trained on texts beyond ASCII; some of its tokens are parts of characters."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer = train_bpe(TEXTS * 3, 290)
    tokenizer.add_special_tokens(["<|naïve|>"])
    tokenizer.save(str(path))
    return path


def test_bytes_of_a_byte_level_vocabulary_beyond_ascii(pairs):
    tokenizer = HuggingFaceTokenizer(pairs)
    lengths = tokenizer.byte_lengths()
    for text in (*TEXTS, "never seen: ü 漢字 🎈", "<|naïve|> added"):
        ids = tokenizer.tokenize(text)
        assert lengths[ids].sum() == len(text.encode())
    ids = tokenizer.tokenize(TEXTS[0])
    assert len(ids) < len(TEXTS[0].encode())
    assert any("\ufffd" in tokenizer.detokenize([token]) for token in ids)  # cut inside of a character
    assert lengths[tokenizer.eod] == 0


def test_bits_per_byte_of_pairs_count_bytes_not_tokens_or_characters(pairs):
    tokenizer = HuggingFaceTokenizer(pairs)
    stream = [tokenizer.eod, *tokenizer.tokenize(TEXTS[0]), tokenizer.eod]
    text = Text(torch.tensor(stream), token_bytes=tokenizer.byte_lengths())
    (row,) = evaluate_extrapolation(
        lambda tokens: torch.zeros(*tokens.shape, 512), text, [len(stream) - 1], progress=False
    )
    # 9 bits for each target; the end of the document costs bits and is no text.
    assert row["bits_per_byte"] == pytest.approx(9 * (len(stream) - 1) / len(TEXTS[0].encode()))
