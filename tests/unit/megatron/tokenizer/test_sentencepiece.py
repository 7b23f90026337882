"""SentencePiece models, against the library and against transformers' LlamaTokenizer."""

import json

import pytest
import sentencepiece
from transformers import AutoTokenizer

from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected
from tests.support.sentencepiece import LLAMA, train_sentencepiece
from tests.support.texts import KINDS


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.model"
    return train_sentencepiece(path, model_type=request.param, **LLAMA)


def test_ids_and_texts_are_those_of_the_library(model):
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    tokenizer = build_tokenizer("SPMTokenizer", model)
    assert (tokenizer.name, tokenizer.vocab_size) == ("SPMTokenizer", library.get_piece_size())
    assert (tokenizer.bos, tokenizer.eod, tokenizer.first) == (
        None,
        library.eos_id(),
        library.eos_id(),
    )
    texts = [*KINDS.values(), "", " a  b", "</s>"]
    for text in texts:
        assert tokenizer.tokenize(text) == library.encode(text)
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize_batch(texts) == [library.encode(text) for text in texts]
    assert tokenizer.eod not in tokenizer.tokenize("</s>")  # unlike in transformers
    assert tokenizer.byte_lengths() is None
    assert "⁇" in tokenizer.detokenize([tokenizer.vocab_size + 3])


def test_a_beginning_of_sequence_token_is_added_as_transformers_does(model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    plain = build_tokenizer("SPMTokenizer", model)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    for keys, added in (({"add_bos_token": True}, [1]), ({}, []), ({"add_bos_token": False}, [])):
        values = {"tokenizer_class": "LlamaTokenizer", **tokens, **keys}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        tokenizer = build_tokenizer("SPMTokenizer", tmp_path / "tokenizer.model")
        assert tokenizer.tokenize(KINDS["python"]) == [*added, *plain.tokenize(KINDS["python"])]
        assert tokenizer.tokenize_batch(["", "a b"]) == [added, [*added, *plain.tokenize("a b")]]
        assert tokenizer.bos == (1 if added else None)
        assert (tokenizer.fingerprint == plain.fingerprint) == (not added)
        assert (
            tokenizer.tokenize_continuation(" is it?")
            == plain.tokenize(". is it?")[len(plain.tokenize(".")) :]
        )
        if "bpe" in str(model):  # transformers converts unigram models differently
            theirs = AutoTokenizer.from_pretrained(tmp_path)
            assert theirs("def f(x):")["input_ids"] == tokenizer.tokenize("def f(x):")


def test_a_continuation_keeps_the_space_before_its_first_word(model):
    tokenizer = build_tokenizer("SPMTokenizer", model)
    prompt, ids = tokenizer.tokenize("The capital is"), tokenizer.tokenize("Paris.")
    assert tokenizer.detokenize_continuation(prompt, ids) == " Paris."
    assert tokenizer.detokenize_continuation(prompt, []) == ""
    assert tokenizer.detokenize_continuation([tokenizer.eod], ids) == "Paris."


def test_the_end_of_documents(tmp_path):
    path = train_sentencepiece(tmp_path / "own.model", control_symbols=["<|endoftext|>"], **LLAMA)
    tokenizer = build_tokenizer("SPMTokenizer", path)
    assert tokenizer.eod == sentencepiece.SentencePieceProcessor(model_file=str(path)).piece_to_id(
        "<|endoftext|>"
    )
    path = train_sentencepiece(tmp_path / "none.model", eos_id=-1, **LLAMA)
    assert_rejected(r"none\.model.*end-of-sequence", build_tokenizer, "SPMTokenizer", path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x0a\xff\xff\xff\x7fab", b"\0" * 100])
def test_other_files_are_rejected(content, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(content)
    assert_rejected(
        r"tokenizer\.model.*SentencePiece",
        build_tokenizer,
        "SPMTokenizer",
        tmp_path / "tokenizer.model",
    )
    with pytest.raises(UserError, match=r"absent\.model.*SPMTokenizer.*SentencePiece"):
        build_tokenizer("SPMTokenizer", tmp_path / "absent.model")


def test_tokens_that_the_model_lacks(model, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model.read_bytes())
    added = {"added_tokens_decoder": {"0": {"content": "<unk>"}, "9000": {"content": "<fim>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    assert_rejected(
        r"9000.*tokenizer\.json", build_tokenizer, "SPMTokenizer", tmp_path / "tokenizer.model"
    )
