"""evaluate_extrapolation on models of this project, of transformers, and on callables, compared
with float64.
"""

import copy
import math

import numpy as np
import pytest
import torch
import transformers

from kerple.attention import AttentionMode, Span
from megatron.evaluation import evaluate_extrapolation
from megatron.evaluation.text import Text
from megatron.inference import load_model
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.utils.errors import UserError
from tests.support.language_models import (
    VOCABULARY,
    AlibiByHand,
    direct_losses,
    random_tokens,
    small_gpt,
)
from tests.support.release import METHODS, checkpoints, reference

STREAM = random_tokens(600)
LENGTHS = [8, 16, 64]

DOCUMENT_STREAM = random_tokens(420)
OFFSETS = np.array([0, 100, 101, 250, 300, 420])
BYTES = np.arange(VOCABULARY) % 5
SPANS = {"full": {}, "window@6": {"window": 6}, "blockwise@16": {"block": 8}}


def mean_loss(model, length: int, total: int, pieces=(0,), **keywords) -> float:
    """The mean loss by definition, in float64, in one call. `pieces`: starts of equal parts of
    `total`.
    """
    starts = [
        piece + offset for piece in pieces for offset in range(0, total // len(pieces), length)
    ]
    text = torch.stack([STREAM[start : start + length + 1] for start in starts])
    with torch.no_grad():
        output = model(text[:, :-1], **keywords)
    return direct_losses(getattr(output, "logits", output), text[:, 1:]).mean().item()


def test_the_token_budget_applies_to_every_length():
    model = AlibiByHand()
    lengths = LENGTHS[::-1]
    rows = evaluate_extrapolation(
        model, STREAM, [*lengths, lengths[0]], token_budget=200, progress=False
    )
    assert [row["length"] for row in rows] == lengths
    assert [row["tokens"] for row in rows] == [192, 192, 192]
    for row in rows:
        assert row["loss"] == pytest.approx(
            mean_loss(model, row["length"], 192, (0, 199, 399)), abs=1e-12
        )


def test_a_token_at_the_beginning_of_each_segment():
    """It replaces the first token, which is not scored. Without it, only the first segment has one,
    so the loss of a model that needs it falls with the length.
    """
    start, token, lengths, records = 3, 5, [16, 32, 64], []

    def model(
        tokens,
    ):  # certain of the next token as long as a text is the start followed by this token
        expected = torch.tensor([start] + (tokens.shape[1] - 1) * [token])
        known = (tokens == expected).cumprod(1)
        return (
            50.0 * known[..., None] * torch.nn.functional.one_hot(torch.tensor(token), VOCABULARY)
        )

    stream = torch.tensor([start] + 64 * [token])
    keywords = {"position_bins": 2, "progress": False, "on_record": records.append}
    plain = evaluate_extrapolation(model, stream, lengths, **keywords)
    rows = evaluate_extrapolation(model, Text(stream, bos=start), lengths, **keywords)
    assert [row["loss"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-6)
    falling = [math.log(VOCABULARY) * (1 - length / 64) for length in lengths]
    assert [row["loss"] for row in plain] == pytest.approx(falling, abs=1e-6)
    assert [record["bos"] for record in records] == 6 * [None] + 6 * [start]
    for row, other in zip(rows, plain, strict=True):
        assert (row["targets"], row["tokens"]) == (other["targets"], other["tokens"])
        assert row["measurement"] != other["measurement"]
    with pytest.raises(UserError, match="token id 64 is outside"):
        evaluate_extrapolation(gpt_neox(), Text(STREAM, bos=64), [16], progress=False)


def test_the_softmax_covers_the_padded_vocabulary():
    """61 tokens and 3 padded entries, all equally likely: each has 1/64, as in training."""
    rows = evaluate_extrapolation(
        lambda tokens: torch.zeros(*tokens.shape, 64),
        STREAM,
        [10],
        vocab_size=VOCABULARY,
        progress=False,
    )
    assert rows[0]["perplexity"] == pytest.approx(64)


def gpt_neox() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.3,
    )
    return transformers.GPTNeoXForCausalLM(config).eval()


def test_a_transformers_model_is_fed_in_chunks():
    model = gpt_neox()
    input_lengths = []
    model.register_forward_pre_hook(
        lambda _, inputs, keywords: input_lengths.append(
            (inputs[0] if inputs else keywords["input_ids"]).shape[1]
        ),
        with_kwargs=True,
    )
    rows = evaluate_extrapolation(model, STREAM, LENGTHS, query_chunk=24, progress=False)
    assert max(input_lengths) == 24
    exact = copy.deepcopy(model).double()
    for row in rows:
        assert row["loss"] == pytest.approx(mean_loss(exact, row["length"], 576), abs=1e-5)


def test_lengths_beyond_a_learned_table_have_a_note():
    model = small_gpt("learned", max_positions=16)
    rows = evaluate_extrapolation(
        model, STREAM, [64, 16, 8], modes=["full", "window@4"], query_chunk=8, progress=False
    )
    beyond = [row for row in rows if row["length"] == 64]
    within = [row for row in rows if row["length"] != 64]
    assert len(beyond) == 2
    assert all(
        row["loss"] is None and row["perplexity"] is None and row["tokens"] == 0 for row in beyond
    )
    assert all("16" in row["note"] for row in beyond)
    assert all(row["loss"] > 0 and row["tokens"] == 576 for row in within)


def test_records_are_reported_as_they_are_measured():
    reported = []

    def model(tokens):
        if tokens.shape[1] == 16:
            raise KeyboardInterrupt
        return torch.zeros(*tokens.shape, VOCABULARY)

    with pytest.raises(KeyboardInterrupt):
        evaluate_extrapolation(model, STREAM, [4, 8, 16], progress=False, on_record=reported.append)
    assert [row["length"] for row in reported] == [4, 8]


def test_the_model_is_unchanged():
    model = small_gpt("alibi", hidden_dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    first = evaluate_extrapolation(model, STREAM, [16], progress=False)
    assert [module.training for module in model.modules()] == modes
    assert first == evaluate_extrapolation(
        model, STREAM, [16], progress=False
    )  # no dropout while evaluating
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_of_nan_becomes_a_note():
    rows = evaluate_extrapolation(
        lambda tokens: torch.full((*tokens.shape, VOCABULARY), torch.nan),
        STREAM,
        [16],
        progress=False,
    )
    assert rows[0]["loss"] is None
    assert rows[0]["note"] == "the loss is nan"


def test_models_with_a_sliding_window():
    """A wider window and blocks are rejected."""
    model = small_gpt("kerple_log", sliding_window_width=5)
    losses = [
        [
            row["loss"]
            for row in evaluate_extrapolation(model, STREAM, [16], modes=[mode], progress=False)
        ]
        for mode in ("full", "window@6", "window@3")
    ]
    assert losses[0] == losses[1] != losses[2]
    for mode in ("blockwise@8", "window@7"):
        with pytest.raises(
            UserError, match=rf"{mode} is not supported for models with sliding_window_width"
        ):
            evaluate_extrapolation(model, STREAM, [16], modes=[mode], progress=False)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [0, 4]}, "length.*0"),
        ({"lengths": [2.9]}, r"length.*2\.9"),
        ({"lengths": ["512"]}, "length.*'512'"),
        ({"lengths": [math.nan]}, "length.*nan"),
        ({"lengths": [1024]}, "600.*1,024"),
        ({"modes": ["window@4"]}, "window@4.*window"),
        ({"modes": ["blockwise"]}, "blockwise"),
        ({"modes": ["sliding"]}, "'sliding'"),
        ({"protocols": ["everything"]}, "'everything'"),
        ({"query_chunk": 0}, "query_chunk.*1"),
        ({"token_budget": 0}, "token_budget.*1"),
        ({"vocab_size": 50}, "60.*50"),
        ({"tokens": STREAM.float()}, r"torch\.float32"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_model_runs(keywords, message):
    def uniform(tokens):
        raise AssertionError("the model was run")

    arguments = {"tokens": STREAM, "lengths": [16], "progress": False, **keywords}
    with pytest.raises(UserError, match=message):
        evaluate_extrapolation(
            uniform, arguments.pop("tokens"), arguments.pop("lengths"), **arguments
        )


@pytest.mark.parametrize(
    ("model", "vocabulary"),
    [(lambda: small_gpt("alibi"), VOCABULARY), (gpt_neox, 64)],
    ids=["native", "transformers"],
)
def test_tokens_outside_the_model_s_vocabulary_are_rejected(model, vocabulary):
    tokens = STREAM.clone()
    tokens[500] = vocabulary
    with pytest.raises(UserError, match=f"{vocabulary}.*{vocabulary}"):
        evaluate_extrapolation(model(), tokens, [16], vocab_size=1000, progress=False)


def test_records_name_the_method_of_the_model():
    def method_of(model, **arguments) -> str | None:
        (row,) = evaluate_extrapolation(
            model, STREAM, [8], token_budget=8, progress=False, **arguments
        )
        return row["pos_emb"]

    assert method_of(small_gpt("kerple_log")) == "kerple_log"
    assert method_of(small_gpt("kerple_log"), pos_emb="mine") == "mine"
    assert (
        method_of(small_gpt("rotary", pos_emb_options={"fraction": 0.5})) == "rotary (fraction 0.5)"
    )
    assert method_of(gpt_neox()) is None
    exported = gpt_neox()
    exported.config.positional_method, exported.config.positional_options = (
        "a_plugin",
        {"floor": 0.5},
    )
    assert method_of(exported) == "a_plugin (floor 0.5)"


def test_progress_is_one_line_per_record_without_a_terminal(capfd):
    evaluate_extrapolation(
        small_gpt("learned", max_positions=16), STREAM, [16, 32], pos_emb="learned"
    )
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("learned full non-overlapping at 16: perplexity ")
    assert "tokens/s" in lines[0]
    assert lines[1].startswith("learned full non-overlapping at 32: n/a: ")


# Protocols, modes and statistics, token by token


def targets_of(protocol, length, longest):
    """(first input, target) pairs by the protocol's definition: one for each scored token."""
    last = len(DOCUMENT_STREAM) - 1
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
    """(target, position, loss) of each scored token, from one call, in float64."""
    pairs = targets_of(protocol, length, longest)
    text = torch.stack(
        [
            DOCUMENT_STREAM[start : start + length + 1]
            for start in dict.fromkeys(s for s, _ in pairs)
        ]
    )
    with torch.no_grad():
        by_position = direct_losses(
            model(text[:, :-1], mode=AttentionMode(Span(**span))), text[:, 1:]
        ).tolist()
    losses = dict(zip(dict.fromkeys(s for s, _ in pairs), by_position, strict=True))
    return [
        (target, target - start - 1, losses[start][target - start - 1]) for start, target in pairs
    ]


@pytest.mark.parametrize(
    ("protocol", "mode"),
    [
        *(
            (protocol, "full")
            for protocol in ("non-overlapping", "kerple@5", "last-k@8", "sliding@8")
        ),
        ("non-overlapping", "window@6"),
        ("last-k@8", "blockwise@16"),
    ],
)
def test_protocols_and_modes_equal_a_direct_computation(protocol, mode):
    model = small_gpt("kerple_log")
    exact = copy.deepcopy(model).double()
    records = []
    text = Text(DOCUMENT_STREAM, OFFSETS, token_bytes=BYTES)
    lengths = [16, 64]
    keys = {"position_bins": 4, "query_chunk": 16, "batch_tokens": 200, "on_record": records.append}
    rows = evaluate_extrapolation(
        model, text, lengths, modes=[mode], protocols=[protocol], progress=False, **keys
    )
    for row, length in zip(rows, lengths, strict=True):
        scored = direct(exact, protocol, length, 64, SPANS[mode])
        losses = np.array([loss for _, _, loss in scored])
        assert (row["protocol"], row["mode"], row["tokens"]) == (protocol, mode, len(scored))
        assert row["loss"] == pytest.approx(losses.mean(), abs=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)
        length_in_bytes = sum(BYTES[DOCUMENT_STREAM[target]] for target, _, _ in scored)
        assert row["bits_per_byte"] == pytest.approx(
            losses.sum() / math.log(2) / length_in_bytes, rel=1e-5
        )
        document_of = (
            np.searchsorted(OFFSETS, [target for target, _, _ in scored], side="right") - 1
        )
        documents = sorted(set(document_of))
        assert row["documents"] == len(documents)
        # The textbook error of a ratio estimate, from the residuals of the documents' sums; of one
        # document, from those of the segments.
        unit_of = document_of
        if len(documents) == 1:
            unit_of = np.array([target - position - 1 for target, position, _ in scored])
        sums = [losses[unit_of == unit].sum() for unit in sorted(set(unit_of))]
        counts = [int((unit_of == unit).sum()) for unit in sorted(set(unit_of))]
        residuals = [
            total - losses.mean() * count for total, count in zip(sums, counts, strict=True)
        ]
        if len(sums) > 1:
            expected = math.sqrt(len(sums) / (len(sums) - 1) * sum(r * r for r in residuals)) / sum(
                counts
            )
            assert row["stderr"] == pytest.approx(expected, rel=1e-3)
        else:
            assert row["stderr"] is None
        positions = next(
            record
            for record in records
            if (record["kind"], record["length"]) == ("positions", length)
        )
        position_of = np.array([position for _, position, _ in scored])
        for i, (low, high) in enumerate(
            zip(positions["edges"], positions["edges"][1:], strict=False)
        ):
            in_bin = (position_of >= low) & (position_of < high)
            assert positions["counts"][i] == in_bin.sum() > 0
            assert positions["losses"][i] == pytest.approx(losses[in_bin].mean(), abs=1e-5)
        assert sum(positions["counts"]) == len(scored)
        assert positions["targets"] == row["targets"]


def test_bits_per_byte_count_bytes_not_tokens_or_characters(tmp_path):
    text = "naïve café – “∑” 東京 🙂\n"
    train_bpe([text] * 3, 290).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    stream = [tokenizer.eod, *tokenizer.tokenize(text), tokenizer.eod]
    (row,) = evaluate_extrapolation(
        lambda tokens: torch.zeros(*tokens.shape, 512),
        Text(torch.tensor(stream), token_bytes=tokenizer.byte_lengths()),
        [len(stream) - 1],
        progress=False,
    )
    # 9 bits per target; the end-of-document token costs bits but has no bytes.
    assert row["bits_per_byte"] == pytest.approx(9 * (len(stream) - 1) / len(text.encode()))


def test_equal_documents_have_an_error_of_zero(capsys):
    text = Text(torch.arange(17) % 2, np.array([0, 9, 17]))
    (row,) = evaluate_extrapolation(lambda tokens: torch.zeros(*tokens.shape, 8), text, [16])
    assert row["stderr"] == pytest.approx(0.0, abs=1e-6)
    assert "± 0.0000" in capsys.readouterr().err


# Losses that the original KERPLE code computed


def stream_of(numbers, row):
    """The inputs and the last label."""
    return torch.cat((numbers["tokens"][row], numbers["labels"][row, -1:])).long()


@pytest.mark.parametrize("method", METHODS)
def test_released_losses_at_four_training_lengths(method):
    """Two texts, in chunks of 16 through the cache. Learned positions end at the
    training length.
    """
    length = 32 if method == "learned" else 128
    numbers = reference(method)[length]
    model, _ = load_model(checkpoints(method), iteration=300)
    keys = {"query_chunk": 16, "progress": False}
    first, second = (
        evaluate_extrapolation(model, stream_of(numbers, row), [length], **keys) for row in range(2)
    )
    loss = (first[0]["loss"] + second[0]["loss"]) / 2
    assert loss == pytest.approx(float(numbers["loss"]), abs=1e-5)


def test_a_callable_with_fewer_logits_than_ids():
    tokens = torch.tensor([1, 2, 3, 9, 4, 5, 6, 7, 8])
    with pytest.raises(UserError, match=r"token id 9.*logits for 9 ids"):
        evaluate_extrapolation(lambda x: torch.zeros(*x.shape, 9), tokens, [4], progress=False)
    evaluate_extrapolation(lambda x: torch.zeros(*x.shape, 10), tokens, [4], progress=False)
