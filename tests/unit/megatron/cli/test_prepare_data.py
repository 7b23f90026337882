"""The command line of prepare_data.py."""

from pathlib import Path

import pytest
import tokenizers

from megatron.cli.prepare_data import main, parse_arguments
from megatron.data.indexed_dataset import open_indexed_files
from megatron.preparation.prepare import PrepareOptions
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.corpora import json_lines
from tests.support.sentencepiece import train_sentencepiece


def test_options():
    assert parse_arguments(["python_stdlib", "--workers", "3"]) == PrepareOptions(
        "python_stdlib", workers=3
    )
    assert parse_arguments(["-d", "./data", "--workers", "1"]) == PrepareOptions(
        "enwik8", Path("data"), workers=1
    )
    assert parse_arguments(["--vocab", "a.json", "pile_subset"]).vocab_file == "a.json"
    words = (
        "-d out -t CharLevelTokenizer --from a --from b --suffixes .c,.h -f --bad-documents skip "
        "--workers 1"
    )
    options = parse_arguments([*words.split(), "--text-key", "content", "github"])
    assert options == PrepareOptions(
        "github",
        Path("out"),
        "CharLevelTokenizer",
        sources=("a", "b"),
        suffixes=(".c", ".h"),
        text_key="content",
        skip_bad=True,
        rebuild=True,
    )


def test_one_end_of_document_with_a_tokenizer_that_appends_one(tmp_path):
    """T5's and Llama's tokenizers put </s> after every text."""
    trained = train_bpe(["one two"], 300)
    trained.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", pair="$A $B", special_tokens=[("<|endoftext|>", 0)]
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines("one", "two"))
    words = [
        "-t",
        "HFTokenizer",
        "--vocab",
        str(tmp_path / "tokenizer.json"),
        "--from",
        str(tmp_path / "a.jsonl"),
    ]
    main(["-d", str(tmp_path), *words, "pile"])
    tokens = open_indexed_files(tmp_path / "pile" / "pile_text_document").open_tokens()[:]
    assert tokens.tolist() == [*trained.encode("one").ids, *trained.encode("two").ids]
    assert (tokens == 0).sum() == 2


@pytest.mark.parametrize("library", ["WordLevel", "Unigram", "sentencepiece"])
def test_text_without_a_token(library, tmp_path, capsys):
    """Text that becomes the unknown token is lost."""
    file = tmp_path / "vocabulary"
    kind = "HFTokenizer"
    if library == "sentencepiece":
        kind = "SPMTokenizer"
        train_sentencepiece(file, model_type="unigram")
    else:
        words = {"<|endoftext|>": 0, "[none]": 1, "one": 2}
        model = tokenizers.models.WordLevel(words, unk_token="[none]")
        if library == "Unigram":
            model = tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=1)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<|endoftext|>", "[none]"])
        tokenizer.save(str(file))
    (tmp_path / "a.jsonl").write_bytes(json_lines("one \ua66e one", "\ua66e"))
    words = ["-t", kind, "--vocab", str(file), "--from", str(tmp_path / "a.jsonl")]
    main(["-d", str(tmp_path), *words, "pile"])
    output = capsys.readouterr().out
    assert "2 tokens are the unknown token" in output
    assert "ends a document" not in output


def test_special_tokens_in_documents(tmp_path, capsys):
    """They are recognized and counted."""
    trained = train_bpe(["one two"], 300)
    trained.add_special_tokens(["<pad>"])
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_bytes(json_lines("one<|endoftext|>two", "<pad>", "two"))
    words = [
        "-t",
        "HFTokenizer",
        "--vocab",
        str(tmp_path / "tokenizer.json"),
        "--from",
        str(tmp_path / "a.jsonl"),
    ]
    words = ["-d", str(tmp_path), *words, "--workers", "2", "pile"]
    prefix, pad = tmp_path / "pile" / "pile_text_document", trained.token_to_id("<pad>")

    main(words)
    output = capsys.readouterr().out
    assert "\n2 special tokens" in "\n" + output
    assert "1 '<|endoftext|>' (ends a document)" in output
    assert "1 '<pad>'" in output
    tokens = open_indexed_files(prefix).open_tokens()[:]
    assert ((tokens == 0).sum(), (tokens == pad).sum()) == (4, 1)
