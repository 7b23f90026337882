"""Building tokenizers by name: what is refused, and how it is said."""

import json

import pytest
import tokenizers

from megatron.tokenizer import build_tokenizer, padded_vocab_size
from megatron.tokenizer.training import train_bpe
from megatron.utils.errors import UserError
from tests.support.texts import KINDS


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(KINDS.values(), 600).save(str(path))
    return path


def _gpt2_files(folder, vocabulary=None, merges="#version: 0.2\na b\n"):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if vocabulary is None:
        vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, "ab", "<|endoftext|>"])}
    (folder / "encoder.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "vocab.bpe").write_text(merges, encoding="utf-8")
    return folder / "encoder.json", folder / "vocab.bpe"


def test_padded_vocab_size():
    assert padded_vocab_size(1) == 128
    assert padded_vocab_size(128) == 128
    assert padded_vocab_size(50257, 128, 8) == 51200
    assert padded_vocab_size(300, 1, 7) == 301
    with pytest.raises(UserError, match=r"model-parallel-size is 0"):
        padded_vocab_size(300, 128, 0)


def test_hugging_face_file(trained):
    tokenizer = build_tokenizer("HFTokenizer", trained)
    assert tokenizer.name == "HFTokenizer"
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 0)
    for text in KINDS.values():
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize(tokenizer.tokenize("a<|endoftext|>b")) == "a<|endoftext|>b"
    assert max(max(ids) for ids in tokenizer.tokenize_batch(list(KINDS.values()))) < tokenizer.vocab_size


def test_ids_beyond_the_number_of_tokens_count(trained, tmp_path):
    content = json.loads(trained.read_text("utf-8"))
    content["model"]["vocab"]["zebra"] = 4000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").vocab_size == 4001


def test_truncation_and_padding_in_the_file_are_off(trained, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(trained))
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=1)
    library.save(str(tmp_path / "tokenizer.json"))
    ids = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").tokenize(KINDS["latex"])
    assert ids == build_tokenizer("HFTokenizer", trained).tokenize(KINDS["latex"])
    assert len(ids) > 64


def test_a_prefix_space_forbids_cutting(trained, tmp_path, monkeypatch):
    from megatron.tokenizer import hugging_face

    library = tokenizers.Tokenizer.from_file(str(trained))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    library.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(hugging_face, "_CHARACTERS_AT_ONCE", 50)
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert tokenizer.tokenize(KINDS["c"]) == library.encode(KINDS["c"]).ids


def test_fingerprints_tell_tokenizers_apart(trained, tmp_path):
    first, again = build_tokenizer("HFTokenizer", trained), build_tokenizer("HFTokenizer", str(trained))
    other = build_tokenizer("GPT2BPETokenizer", *_gpt2_files(tmp_path))
    characters = build_tokenizer("CharLevelTokenizer")
    assert first.fingerprint == again.fingerprint
    assert len({first.fingerprint, other.fingerprint, characters.fingerprint}) == 3


@pytest.mark.parametrize("text", KINDS.values(), ids=KINDS.keys())
def test_characters(text):
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert tokenizer.tokenize(text) == list(text.encode("utf-8"))
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_characters_facts():
    tokenizer = build_tokenizer("CharLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod) == (512, 0)
    assert tokenizer.detokenize([104, 105, 300, 0xC3]) == "hi\ufffd\ufffd"


@pytest.mark.parametrize("name", ["SPMTokenizer", "TiktokenTokenizer", "HFGPT2Tokenizer", "HFLlamaTokenizer"])
def test_unsupported_types_are_refused_by_name(name):
    with pytest.raises(UserError, match=f"{name} is not supported: .*use "):
        build_tokenizer(name, "vocab")


def test_unknown_type():
    with pytest.raises(UserError, match=r"unknown tokenizer-type 'BertTokenizer'; supported: HFTokenizer"):
        build_tokenizer("BertTokenizer")


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"HFTokenizer needs vocab-file: the path of a tokenizer.json"):
        build_tokenizer("HFTokenizer")
    with pytest.raises(UserError, match=r"absent.json is not a file"):
        build_tokenizer("HFTokenizer", tmp_path / "absent.json")
    vocabulary, _ = _gpt2_files(tmp_path)
    with pytest.raises(UserError, match=r"needs merge-file: GPT-2's vocab.bpe.*installed here as"):
        build_tokenizer("GPT2BPETokenizer", vocabulary)


def test_not_a_tokenizer_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"is not a tokenizer.json that the tokenizers library reads"):
        build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")


def test_no_end_of_document_token(tmp_path):
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    library.add_special_tokens(["<s>", "</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no <\|endoftext\|> token .* special tokens: </s>, <s>"):
        build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")


def test_gpt2_files_the_wrong_way_round(tmp_path):
    vocabulary, merges = _gpt2_files(tmp_path)
    with pytest.raises(UserError, match=r"vocab-file .*vocab.bpe is not JSON"):
        build_tokenizer("GPT2BPETokenizer", merges, vocabulary)


def test_a_tokenizer_json_is_no_gpt2_vocabulary(trained, tmp_path):
    _, merges = _gpt2_files(tmp_path)
    with pytest.raises(UserError, match=r"use tokenizer-type HFTokenizer"):
        build_tokenizer("GPT2BPETokenizer", trained, merges)


@pytest.mark.parametrize(
    ("merges", "message"),
    [
        ("#version: 0.2\na b\nc d e\n", "vocab.bpe, line 3: expected two tokens, found 'c d e'"),
        ("#version: 0.2\na c\n", "vocab.bpe does not belong to vocab-file .*encoder.json"),
    ],
)
def test_bad_merges(tmp_path, merges, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer("GPT2BPETokenizer", *_gpt2_files(tmp_path, merges=merges))


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ({"a": 0, "b": 1, "ab": 2}, r"no <\|endoftext\|> entry"),
        ({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}, "lacks 254 of the 256 byte symbols"),
        (["a", "b"], "does not map tokens to ids"),
    ],
)
def test_bad_vocabulary(tmp_path, vocabulary, message):
    with pytest.raises(UserError, match=message):
        build_tokenizer("GPT2BPETokenizer", *_gpt2_files(tmp_path, vocabulary))
