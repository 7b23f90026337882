"""JSON checked against a type."""

import pytest
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from megatron.utils.typed_json import Count, Float, Text, parse_json
from tests.support.errors import assert_rejected


class Values(TypedDict):
    name: Text
    counts: list[Count]
    ratio: Float | None


VALUES = TypeAdapter(Values)


def test_a_document():
    content = b'{"name": "\\u03b1 \\u001b", "counts": [0, 3], "ratio": 2, "more": [1]}'
    assert parse_json(content, VALUES, "x.json") == {
        "name": "\u03b1 \\x1b",
        "counts": [0, 3],
        "ratio": 2,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.json: not valid JSON .EOF while parsing a value at column 0"),
        (b"{\n 3}", "x.json: not valid JSON .key must be a string at line 2 column 2"),
        (b"3", "x.json: must be a mapping, not 3"),
        (b'{"name": "a", "counts": []}', "x.json: ratio is missing"),
        (
            b'{"name": "a", "counts": [0, true], "ratio": 1}',
            r"counts\[1\] must be an integer, not True",
        ),
        (b'{"name": "a", "counts": [-1], "ratio": 1}', r"counts\[0\] .*0, not -1"),
        (b'{"name": "a", "counts": [], "ratio": 1e999}', "ratio must be a finite number, not inf"),
    ],
)
def test_wrong_documents(content, message):
    assert_rejected(message, parse_json, content, VALUES, "x.json")
