"""Parsing of chunks into documents, and the error messages for unreadable documents."""

import json

import pytest

from megatron.preparation.documents import DocumentOptions, SkippedDocuments, parse_documents
from megatron.preparation.readers import TextChunk
from tests.support.errors import assert_rejected


def parse(content, kind="lines", first_line=1, skipped=None, **options):
    """The texts of each document in a chunk. A list of values becomes JSON lines."""
    if isinstance(content, list):
        content = "\n".join(json.dumps(value) for value in content).encode()
    chunk = TextChunk("shard.jsonl", kind, first_line, content)
    skipped = SkippedDocuments() if skipped is None else skipped
    return list(parse_documents(chunk, DocumentOptions(**options), skipped))


def test_record_types():
    assert parse(["bare", {"text": ["p", "q"]}]) == [["bare"], ["p\n\nq"]]
    assert parse(b"whole\nfile", kind="text") == [["whole\nfile"]]
    assert parse(b'["one", {"text": "two"}]', kind="list") == [["one"], ["two"]]
    assert parse(b"\xef\xbb\xbf" + json.dumps({"text": "after a BOM"}).encode()) == [
        ["after a BOM"]
    ]
    assert parse(b'\n  \r\n{"text": "x"}\r\n\n') == [["x"]]


def test_subset_of_the_pile():
    lines = [
        {"text": name, "meta": {"pile_set_name": name}}
        for name in ("Github", "ArXiv", "Github", "FreeLaw")
    ]
    skipped = SkippedDocuments()
    texts = parse(
        [*lines, {"text": "no name"}, {"text": "none", "meta": None}],
        skipped=skipped,
        subset="Github",
    )
    assert texts == [["Github"], ["Github"], ["no name"], ["none"]]
    assert skipped.other_subsets == {"ArXiv": 1, "FreeLaw": 1}


def test_documents_that_do_not_name_their_subset_are_reported():
    """Copies of the Pile exist whose `meta` is a string."""
    lines = [{"text": "a", "meta": '{"pile_set_name": "ArXiv"}'}, {"text": "b"}]
    total = SkippedDocuments()
    for _ in range(2):
        skipped = SkippedDocuments()
        assert parse(lines, skipped=skipped, subset="Github") == [["a"], ["b"]]
        total.add(skipped)
    (line,) = total.lines()
    assert " 4 " in line
    unselected = SkippedDocuments()
    parse(lines, skipped=unselected)
    parse(b"int main;", skipped=unselected, subset="Github", kind="text")
    assert unselected.lines() == []


BAD_LINES = [
    (b'{"text": "a"', r"line 42: not JSON: .*column"),
    (b"not json", r"line 42: not JSON"),
    (b'{"txt": "a", "meta": {}}', r"line 42: no key 'text'; its keys: txt, meta"),
    (b'{"text": 3}', r"line 42: 'text' is not a string but int"),
    (b'{"text": ["a", 3]}', r"line 42: 'text' is not a string but list"),
    (b"7", r"line 42: expected an object or a string, found int"),
    (b'{"text": "caf\xe9"}', r"line 42: not UTF-8 \(0xe9 is byte 14 of the line\)"),
    (b'{"text": "\\ud800"}', r"line 42: unpaired surrogate at character 0"),
    (b"[" * 100000, r"line 42: JSON nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line(line, message):
    content = b'{"text": "good"}\n\n' + line + b'\n{"text": "too"}'
    assert_rejected(rf"shard.jsonl, {message}.*--bad-documents skip", parse, content, first_line=40)
    skipped = SkippedDocuments()
    assert parse(content, first_line=40, skipped=skipped, skip_bad=True) == [["good"], ["too"]]
    assert skipped.bad == 1
    assert skipped.examples[0].startswith("shard.jsonl, line 42: ")


def test_text_file_that_is_not_utf8():
    assert_rejected(r"shard\.jsonl.*3.*0xff.*2", parse, b"one\ntwo\nx\xff", kind="text")


def test_list():
    """Items are parsed one by one. White space as in JSON, and a BOM, are allowed."""
    for values in ([], ["a"], ["a", {"text": "b,]["}, {"text": ["c", "d"]}]):
        expected = [["a"], ["b,]["], ["c\n\nd"]][: len(values)]
        for indent in (None, 2):
            content = b"\xef\xbb\xbf \r\n" + json.dumps(values, indent=indent).encode() + b"\n\t "
            assert parse(content, kind="list") == expected
    assert_rejected(r"shard\.jsonl.*1", parse, b"[1]", kind="list")
