"""The text of --text, and the token before each segment."""

import pytest

from megatron.cli.evaluation_text import first_token, text_of_file
from megatron.tokenizer.tokenizer import CharLevelTokenizer
from tests.support.errors import assert_rejected


def test_documents_have_their_end_tokens(tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "c"}\n')
    lines = []
    text = text_of_file(path, CharLevelTokenizer(), lines.append)
    assert not lines
    assert text.tokens.tolist() == [*b"ab", 0, *b"c", 0]
    assert text.documents is not None
    assert text.documents.tolist() == [0, 3, 5]
    path.write_text("")
    assert_rejected("two.jsonl", text_of_file, path, CharLevelTokenizer(), lines.append)


class WithUnknown(CharLevelTokenizer):
    unknown_id = ord("b")


def test_unknown_tokens_are_reported(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("abcb")
    lines = []
    text_of_file(path, WithUnknown(), lines.append)
    (line,) = lines
    assert "2 tokens are the unknown token 'b'" in line


class WithBeginning(CharLevelTokenizer):
    bos = 7


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [(CharLevelTokenizer(), [None, 0, None]), (WithBeginning(), [7, 7, None])],
)
def test_the_first_token(tokenizer, expected):
    assert [first_token(tokenizer, bos) for bos in ("auto", "always", "never")] == expected
