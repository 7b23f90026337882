"""Passkey retrieval: what the prompts are, and what counts as an answer."""

import re

import pytest
import torch

from megatron.evaluation.measures.passkey import ANSWER, FILLER, INTRODUCTION, KEY, QUESTION, Prompts, plan_passkey
from megatron.evaluation.records import Provenance
from megatron.evaluation.work import measure
from megatron.tokenizer import CharLevelTokenizer
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.utils.errors import UserError
from tests.support.language_models import small_gpt

CHARACTERS = CharLevelTokenizer()


@pytest.fixture(scope="module")
def bytes_and_pairs(tmp_path_factory):
    """A byte-level BPE for which numbers of five digits are two to five tokens."""
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    numbers = [f"{number}" for number in range(10_000, 100_000, 137)]
    train_bpe([INTRODUCTION, KEY, QUESTION, *FILLER, " ".join(numbers)], 500).save(str(path))
    return HuggingFaceTokenizer(path)


@pytest.mark.parametrize("kind", ["characters", "pairs"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_has_its_length_and_its_key_at_its_depth(kind, depth, request):
    tokenizer = CHARACTERS if kind == "characters" else request.getfixturevalue("bytes_and_pairs")
    for length in (300, 2000):
        rows, answers = Prompts(tokenizer).make(length, depth, 4)
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


def test_prompts_follow_from_the_seed():
    first, again, other = (Prompts(CHARACTERS, seed).make(300, 0.5, 3)[0] for seed in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)
    assert len({tuple(row) for row in first.tolist()}) == 3
    with pytest.raises(
        UserError, match=r"--passkey: 64 tokens have no room .* choose --lengths from (\d+) on"
    ) as error:
        plan_passkey(Prompts(CHARACTERS), [64], ["full"], [0.5], 1, Provenance())
    least = int(re.search(r"from (\d+) on", str(error.value))[1])
    assert Prompts(CHARACTERS).make(least, 0.5, 1)[0].shape == (1, least + 1)


def test_the_whole_number_counts_and_nothing_before_it(bytes_and_pairs):
    """A reader that knows the number where it lies within its sight, and is never right elsewhere."""
    prompts = Prompts(bytes_and_pairs)
    rows, answers = prompts.make(600, 0.5, 6)
    assert len(set(answers)) > 1
    known = {tuple(row[:-1]): (row, answer) for row, answer in zip(rows.tolist(), answers, strict=True)}
    spoiled = {1: -1, 4: -2}  # these trials are wrong in one token

    def reader(tokens):
        logits = torch.zeros(*tokens.shape, bytes_and_pairs.vocab_size)
        for row, text in zip(logits, tokens.tolist(), strict=True):
            whole, answer = known[tuple(text)]
            trial = list(known).index(tuple(text))
            for place in range(-len(text), 0):
                row[place, whole[place] if place >= -answer else (whole[place] + 1) % 300] = 1
            if trial in spoiled:
                row[spoiled[trial]] = 0
        return logits

    work = plan_passkey(prompts, [600], ["full"], [0.5], 6, Provenance(), "corpus")
    (record,) = measure(reader, work, batch_tokens=1300, progress=False)
    assert (record["correct"], record["trials"], record["accuracy"]) == (4, 6, 4 / 6)
    assert (record["length"], record["depth"], record["protocol"], record["corpus"]) == (600, 0.5, "passkey", "corpus")


def test_through_the_cache_it_is_greedy_decoding():
    """Answers that the model itself gives, word for word, in every other trial."""
    model = small_gpt("kerple_log", padded_vocab_size=512)

    class OwnAnswers(Prompts):
        def make(self, length, depth, trials):
            rows, answers = super().make(length, depth, trials)
            for row, answer in list(zip(rows, answers, strict=True))[::2]:
                for place in range(length + 1 - answer, length + 1):
                    row[place] = model(row[None, :place])[0, -1].argmax()
            return rows, answers

    with torch.no_grad():
        works = plan_passkey(OwnAnswers(CHARACTERS), [256], ["full"], [0.5], 4, Provenance())
        (record,) = measure(model, works, query_chunk=253, batch_tokens=600, progress=False)
    assert record["correct"] == 2


def test_a_length_without_positions_has_a_note():
    works = plan_passkey(Prompts(CHARACTERS), [256], ["full"], [0.0, 1.0], 2, Provenance())
    model = small_gpt("learned", max_positions=32, padded_vocab_size=512)
    for record in measure(model, works, progress=False):
        assert (record["accuracy"], record["correct"], record["trials"]) == (None, 0, 2)
        assert "32" in record["note"]
