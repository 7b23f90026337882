"""Passkey retrieval: what the prompts are, and what counts as an answer."""

import re

import pytest
import torch

from kerple.attention import parse_mode
from megatron.evaluation.metrics.passkey import (
    ANSWER,
    FILLER,
    INTRODUCTION,
    KEY,
    QUESTION,
    Prompts,
    plan_passkey,
)
from megatron.evaluation.records import Provenance
from megatron.evaluation.runner import run_eval_tasks
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.tokenizer.tokenizer import CharLevelTokenizer, build_tokenizer
from megatron.utils.errors import UserError
from tests.support.language_models import small_gpt
from tests.support.sentencepiece import LLAMA, train_sentencepiece

CHARACTERS = CharLevelTokenizer()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE for which numbers of five digits are two to five tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    numbers = [f"{number}" for number in range(10_000, 100_000, 137)]
    train_bpe([INTRODUCTION, KEY, QUESTION, *FILLER, " ".join(numbers)], 500).save(str(path))
    return HuggingFaceTokenizer(path)


@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_length_of_prompts_and_depth_of_keys(kind, depth, request):
    tokenizer = CHARACTERS if kind == "characters" else request.getfixturevalue("bpe")
    for length in (300, 2000):
        rows, answers = Prompts(tokenizer).build(length, depth, 4)
        assert rows.shape == (4, length + 1)
        for row, answer in zip(rows.tolist(), answers, strict=True):
            text = tokenizer.detokenize(row)
            key = text[-5:]
            assert tokenizer.detokenize(row[-answer:]) == ANSWER.format(key=key)
            assert re.fullmatch(r"[1-9]\d{4}", key)
            assert text.startswith(INTRODUCTION)
            assert text.endswith(QUESTION + ANSWER.format(key=key))
            assert text.count(KEY.format(key=key)) == 1
            filler = text[len(INTRODUCTION) : -len(QUESTION) - 6]
            before, after = filler.split(KEY.format(key=key))
            total = len(before) + len(after)
            assert len(before) == pytest.approx(depth * total, abs=max(map(len, FILLER)))
            assert before == "" or before.endswith(".")
            assert after == "" or any(map(after.endswith, FILLER))
            assert depth != 0 or before == ""
            assert depth != 1 or after == ""


def test_prompts_of_a_tokenizer_that_adds_tokens_to_texts(tmp_path):
    """<s> comes first and only there; the space that SentencePiece puts before a text is not
    repeated.
    """
    train_sentencepiece(tmp_path / "tokenizer.model", **LLAMA)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    tokenizer = build_tokenizer("SPMTokenizer", tmp_path / "tokenizer.model")
    prompts = Prompts(tokenizer)
    (task,) = plan_passkey(prompts, [400], ["full"], [0.5], 1, Provenance())
    assert task.planned[0]["bos"] == tokenizer.bos
    rows, _ = prompts.build(400, 0.5, 3)
    for row in rows.tolist():
        assert row.count(tokenizer.bos) == 1
        assert row[0] == tokenizer.bos
        text = tokenizer.detokenize(row)
        assert text.startswith(INTRODUCTION)
        assert "  " not in text


def test_prompts_are_determined_by_the_seed():
    first, again, other = (Prompts(CHARACTERS, seed).build(300, 0.5, 3)[0] for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert len({tuple(row) for row in first.tolist()}) == 3
    with pytest.raises(UserError, match=r"--passkey: 64.*--lengths") as error:
        plan_passkey(Prompts(CHARACTERS), [64], ["full"], [0.5], 1, Provenance())
    minimum = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert Prompts(CHARACTERS).build(minimum, 0.5, 1)[0].shape == (1, minimum + 1)


def test_only_the_complete_number_is_correct(bpe):
    """The model predicts the tokens of the answer, except one in two of the trials, and no token
    before the answer.
    """
    prompts = Prompts(bpe)
    rows, answers = prompts.build(600, 0.5, 6)
    assert len(set(answers)) > 1
    known = {
        tuple(row[:-2]): (row, answer) for row, answer in zip(rows.tolist(), answers, strict=True)
    }
    spoiled = {1: -1, 4: -2}  # these trials are wrong in one token

    def model(tokens):
        logits = torch.zeros(*tokens.shape, bpe.vocab_size)
        for row, text in zip(logits, tokens.tolist(), strict=True):
            prompt, answer = known[tuple(text[:-1])]
            trial = list(known).index(tuple(text[:-1]))
            for place in range(-len(text), 0):
                row[place, prompt[place] if place >= -answer else (prompt[place] + 1) % 300] = 1
            if trial in spoiled:
                row[spoiled[trial]] = 0
        return logits

    tasks = plan_passkey(prompts, [600], ["full"], [0.5], 6, Provenance(), "corpus")
    (record,) = run_eval_tasks(model, tasks, batch_tokens=1300, progress=False)
    assert (record["correct"], record["trials"], record["accuracy"]) == (4, 6, 4 / 6)
    assert (record["length"], record["depth"], record["protocol"], record["corpus"]) == (
        600,
        0.5,
        "passkey",
        "corpus",
    )


@pytest.mark.parametrize("name", ["full", "sinks@2+9+logn"])
def test_answers_are_those_of_greedy_decoding(name):
    """In every other trial, the answer is replaced by what the model itself decodes."""
    model, mode = small_gpt("kerple_log", padded_vocab_size=512), parse_mode(name, 32).attention

    class OwnAnswers(Prompts):
        def build(self, length, depth, trials):
            rows, answers = super().build(length, depth, trials)
            for row, answer in list(zip(rows, answers, strict=True))[::2]:
                for place in range(length + 1 - answer, length + 1):
                    row[place] = model(row[None, :place], mode=mode)[0, -1].argmax()
            return rows, answers

    with torch.no_grad():
        tasks = plan_passkey(
            OwnAnswers(CHARACTERS), [256], [name], [0.5], 4, Provenance(train_length=32)
        )
        (record,) = run_eval_tasks(model, tasks, query_chunk=253, batch_tokens=600, progress=False)
    assert (record["mode"], record["correct"]) == (name, 2)


def test_a_length_without_positions_has_a_note():
    tasks = plan_passkey(Prompts(CHARACTERS), [256], ["full"], [0.0, 1.0], 2, Provenance())
    model = small_gpt("learned", max_positions=32, padded_vocab_size=512)
    for record in run_eval_tasks(model, tasks, progress=False):
        assert (record["accuracy"], record["correct"], record["trials"]) == (None, 0, 2)
        assert "32" in record["note"]


def test_the_shortest_prompt_has_no_filler():
    prompts = Prompts(CHARACTERS)
    parts = INTRODUCTION + KEY.format(key=12345) + QUESTION + ANSWER.format(key=12345)
    shortest = len(parts) - 1
    with pytest.raises(UserError, match=f"{shortest:,}"):
        prompts.check(shortest - 1, 0.5, 3)
    prompts.check(shortest, 0.5, 3)
    assert prompts.build(shortest, 0.5, 3)[0].shape == (3, len(parts))
