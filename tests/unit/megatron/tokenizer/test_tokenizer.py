"""build_tokenizer, CharLevelTokenizer and vocabulary padding."""

import pytest

from megatron.tokenizer.tokenizer import CharLevelTokenizer, build_tokenizer, padded_vocab_size
from tests.support.errors import assert_rejected
from tests.support.texts import KINDS


def test_padded_vocab_size():
    assert padded_vocab_size(1) == 128
    assert padded_vocab_size(128) == 128
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(300, 1, 7) == 301


@pytest.mark.parametrize("text", KINDS.values(), ids=KINDS.keys())
def test_char_level_tokenizer_encodes_utf8_bytes(text):
    tokenizer, text = build_tokenizer("CharLevelTokenizer"), text.replace("\0", "")
    assert tokenizer.tokenize(text) == list(text.encode("utf-8"))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_a_text_cannot_end_its_document():
    for encode in (
        CharLevelTokenizer().tokenize,
        lambda text: CharLevelTokenizer().tokenize_batch(["a", text]),
    ):
        assert_rejected(r"'\\x00'.*CharLevelTokenizer", encode, "b\0c")


def test_char_level_tokenizer_vocabulary():
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (512, 0)
    assert tokenizer.detokenize([104, 105, 300, 0xC3]) == "hi\ufffd\ufffd"
    assert tokenizer.detokenize_continuation([104], [105]) == "i"
    assert (
        tokenizer.detokenize_continuation([0xC3], [0xA4]) == "\ufffd"
    )  # the prompt's text changes


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        *(
            (name, ["vocab"], f"{name} is not supported: .*use ")
            for name in ("TiktokenTokenizer", "HFLlamaTokenizer", "HFGPT2Tokenizer")
        ),
        ("HFTokenizer", [], r"HFTokenizer.*vocab-file.*tokenizer\.json"),
        ("HFTokenizer", ["absent.json"], r"absent\.json"),
        ("GPT2BPETokenizer", ["encoder.json"], r"merge-file.*GPT-2's.*vocab\.bpe"),
    ],
)
def test_types_and_files_that_are_rejected(tmp_path, name, files, message):
    (tmp_path / "encoder.json").write_text("{}")
    assert_rejected(message, build_tokenizer, name, *(tmp_path / file for file in files))


def test_byte_lengths_of_characters():
    tokenizer = CharLevelTokenizer()
    text = "naïve ∑ text\n"
    ids = tokenizer.tokenize(text)
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.byte_lengths()[tokenizer.eod] == 0
