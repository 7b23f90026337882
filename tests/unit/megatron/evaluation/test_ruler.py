"""RULER's tasks: answers and places recomputed from the text of the prompts."""

import re

import pytest

from megatron.evaluation.ruler import METRIC, NOISE, RULER_TASKS, documents, process_results
from megatron.tokenizer import CharLevelTokenizer
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, train_bpe
from megatron.utils.errors import UserError

LENGTH = 1200


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    texts = [document["input"] for document in documents("niah_multikey", CharLevelTokenizer(), 3000, 3, 1)[0]]
    train_bpe(texts, 400).save(str(path))
    return HuggingFaceTokenizer(path)


def solve(name, text):
    """(the answers in the order asked for, their places from 0 to 1)."""
    _, body, question = text.split("\n")
    if name == "variable_tracking":
        (number,) = re.findall(r"have the value (\d{5})\?", question)
        source, names, places = number, [], []
        for match in re.finditer(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", body):
            assert match[2] == source, "one chain, in order"
            source = match[1]
            names.append(source)
            places.append(match.start() / len(body))
        assert f"The {len(names)} variables with the value {number} are" in question
        return names, places
    asked = re.search(r"does the text give for (.*)\?", question)[1].split(", ")
    found = [
        (match[1], match[2], match.start() / len(body)) for match in re.finditer(r"number of (\S+) is (\d+)\.", body)
    ]
    by_key = [[entry for entry in found if entry[0] == key] for key in asked]
    return [number for entries in by_key for _, number, _ in entries], [p for entries in by_key for *_, p in entries]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "characters") for name in RULER_TASKS), ("niah_multikey", "bpe"), ("niah_single", "bpe")],
)
def test_prompts_and_answers(name, kind, request):
    tokenizer = CharLevelTokenizer() if kind == "characters" else request.getfixturevalue("bpe")
    found, new_tokens = documents(name, tokenizer, LENGTH, 8, 0)
    assert found == documents(name, tokenizer, LENGTH, 8, 0)[0]
    places: list[float] = []
    for document in found:
        text, answers = document["input"], document["answers"]
        solved, at = solve(name, text)
        places += at
        assert sorted(solved) == sorted(answers)
        assert name == "niah_multivalue" or solved == answers
        number = r"\d{7}" if name != "variable_tracking" else "[A-Z]{5}"
        assert (
            len(answers)
            == len(set(answers))
            == {"niah_single": 1, "niah_multikey": 1, "variable_tracking": 5}.get(name, 4)
        )
        assert all(re.fullmatch(number, answer) for answer in answers)
        assert document["tokens"] == len(tokenizer.tokenize(text)) + new_tokens
        # No further sentence fits.
        longest = max(
            len(tokenizer.tokenize(" " + sentence)) for sentence in (*NOISE, text.split("\n")[1].split(". ")[0])
        )
        assert LENGTH - longest - 8 <= document["tokens"] <= LENGTH
        assert new_tokens >= len(tokenizer.tokenize(" " + ", ".join(answers)))
        assert not text.endswith(" ")
    assert min(places) < 0.35
    assert max(places) > 0.65
    assert found != documents(name, tokenizer, LENGTH, 8, 1)[0]


def test_other_needles_have_other_keys():
    for document in documents("niah_multikey", CharLevelTokenizer(), LENGTH, 6, 0)[0]:
        body, question = document["input"].split("\n")[1:]
        keys = re.findall(r"The secret number of (\S+) is \d{7}\.", body)
        assert len(keys) > 15
        assert body == " ".join(re.findall(r"The secret number of \S+ is \d{7}\.", body)), "only needles"
        assert keys.count(re.search(r"give for (\S+)\?", question)[1]) == 1


def test_too_short_a_length():
    with pytest.raises(UserError, match=r"--lengths 200: niah_multiquery takes at least \d+ tokens") as error:
        documents("niah_multiquery", CharLevelTokenizer(), 200, 1, 0)
    minimum = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert documents("niah_multiquery", CharLevelTokenizer(), minimum, 1, 0)[0][0]["tokens"] == minimum


def test_score():
    document = {"answers": ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]}
    assert process_results(document, [" abcde, then XPQRST"]) == {METRIC: 0.5}
    assert process_results(document, [""]) == {METRIC: 0.0}
