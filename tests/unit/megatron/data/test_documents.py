"""Taking texts out of JSON lines, and what is said about lines that hold none."""

import json

import numpy as np
import pytest

from megatron.data.chunks import Chunk
from megatron.data.documents import DocumentOptions, encode_chunks
from megatron.tokenizer import build_tokenizer
from megatron.utils.errors import UserError
from tests.support.texts import KINDS

CHARACTERS = build_tokenizer("CharLevelTokenizer")


def encode(content, kind="lines", first_line=1, tokenizer=CHARACTERS, **options):
    if isinstance(content, list):
        content = "\n".join(json.dumps(value) for value in content).encode()
    return encode_chunks([Chunk("shard.jsonl", kind, first_line, content)], tokenizer, DocumentOptions(**options))


def texts(encoded, column=0) -> list[str]:
    ends = np.cumsum(encoded.lengths[column])
    return [CHARACTERS.detokenize(ids) for ids in np.split(encoded.tokens[column], ends)[:-1]]


def test_texts_come_out_as_they_went_in():
    encoded = encode([{"text": text, "meta": {}} for text in KINDS.values()])
    assert texts(encoded) == list(KINDS.values())
    assert encoded.text_bytes == [sum(len(text.encode()) for text in KINDS.values())]
    assert encoded.tokens[0].dtype == np.uint16
    assert encoded.lengths[0].dtype == np.int32


def test_end_of_document():
    encoded = encode([{"text": "ab"}, {"text": ""}, {"text": "c"}], append_eod=True)
    assert encoded.tokens[0].tolist() == [97, 98, 0, 99, 0]
    assert encoded.lengths[0].tolist() == [3, 2]
    assert encoded.empty == [1]


def test_several_keys():
    encoded = encode([{"a": "one", "b": "two"}, {"a": "three", "b": ""}], keys=("b", "a"))
    assert texts(encoded, 0) == ["two"]
    assert texts(encoded, 1) == ["one", "three"]
    assert encoded.empty == [1, 0]


def test_kinds_of_records():
    assert texts(encode(["bare", {"text": ["p", "q"]}])) == ["bare", "p\n\nq"]
    assert texts(encode(b"whole\nfile", kind="text")) == ["whole\nfile"]
    assert texts(encode(b'["one", {"text": "two"}]', kind="list")) == ["one", "two"]
    assert texts(encode(b"\xef\xbb\xbf" + json.dumps({"text": "after a mark"}).encode())) == ["after a mark"]
    assert texts(encode(b'\n  \r\n{"text": "x"}\r\n\n')) == ["x"]


def test_subset_of_the_pile():
    lines = [{"text": name, "meta": {"pile_set_name": name}} for name in ("Github", "ArXiv", "Github", "FreeLaw")]
    encoded = encode([*lines, {"text": "no name"}, {"text": "none", "meta": None}], subset="Github")
    assert texts(encoded) == ["Github", "Github", "no name", "none"]
    assert encoded.other_subsets == {"ArXiv": 1, "FreeLaw": 1}


BAD = [
    (b'{"text": "a"', r"line 42: not JSON: .*column"),
    (b"not json", r"line 42: not JSON"),
    (b'{"txt": "a", "meta": {}}', r"line 42: no key 'text'; its keys: txt, meta"),
    (b'{"text": 3}', r"line 42: 'text' is not a text but int"),
    (b'{"text": ["a", 3]}', r"line 42: 'text' is not a text but list"),
    (b"7", r"line 42: expected an object or a text, found int"),
    (b'{"text": "caf\xe9"}', r"line 42: not UTF-8 \(0xe9 is byte 14 of the line\)"),
    (b'{"text": "\\ud800"}', r"line 42: half a surrogate pair at character 0"),
    (b"[" * 100000, r"line 42: JSON nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_line_is_named(line, message):
    content = b'{"text": "good"}\n\n' + line + b'\n{"text": "too"}'
    with pytest.raises(UserError, match=rf"shard.jsonl, {message}.*--bad-documents skip"):
        encode(content, first_line=40)
    skipped = encode(content, first_line=40, skip_bad=True)
    assert texts(skipped) == ["good", "too"]
    assert len(skipped.bad) == 1
    assert skipped.bad[0].startswith("shard.jsonl, line 42: ")


def test_text_file_that_is_not_utf8():
    with pytest.raises(UserError, match=r"shard.jsonl, line 3: not UTF-8 \(0xff is byte 2 of the line\)"):
        encode(b"one\ntwo\nx\xff", kind="text")


def test_list_that_is_not_json():
    with pytest.raises(UserError, match=r"shard.jsonl: not JSON"):
        encode(b"[1, 2", kind="list")


def test_ids_too_large_for_their_type_are_never_wrapped():
    class Broken(type(CHARACTERS)):
        def tokenize(self, text):
            return [70000]

    with pytest.raises(OverflowError):
        encode([{"text": "a"}], tokenizer=Broken())
