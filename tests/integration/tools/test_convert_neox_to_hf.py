"""GPT-NeoX's command line for the conversion to Hugging Face."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPTNeoXForCausalLM

from megatron.config import UserError
from megatron.tokenizer.hugging_face import train_bpe
from tests.support.checkpoints import write_checkpoint
from tests.support.texts import KINDS
from tools.ckpts import convert_neox_to_hf


@pytest.fixture
def words(tmp_path) -> list[str]:
    """The options that convert a checkpoint of a rotary model, to tmp_path/hf."""
    write_checkpoint(tmp_path / "ours", "rotary", "nowhere")
    write_config(tmp_path, num_layers=2, **{"hidden-size": 32, "pos-emb": "rotary"})
    paths = ("--input_dir", "ours/global_step4"), ("--config_file", "my.yml"), ("--output_dir", "hf")
    return [word for option, path in paths for word in (option, str(tmp_path / path))]


def write_config(folder: Path, **keys: object) -> None:
    (folder / "my.yml").write_text(json.dumps(keys))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("auto", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_precision(words, tmp_path, precision, dtype):
    convert_neox_to_hf.main([*words, "--precision", precision, "--architecture", "neox", "--no_save_tokenizer"])
    assert GPTNeoXForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == dtype
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_tokenizer_of_the_configuration_file(words, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    train_bpe(KINDS.values(), 400).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    write_config(tmp_path, vocab_file=str(tmp_path / "tokenizer"))
    convert_neox_to_hf.main([*words, "--vocab-is-hf-tokenizer"])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == 400


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ({}, ["--architecture", "llama"], "--architecture llama.*gpt_neox"),
        ({}, ["--input-dir", "ours"], "--input_dir ours.*global_stepN"),
        ({"hidden-size": 64}, [], r"my\.yml.*hidden_size 32.*64"),
        ({"pos-emb": "alibi"}, [], r"my\.yml.*pos_emb.*alibi"),
    ],
)
def test_errors(words, tmp_path, keys, options, message):
    write_config(tmp_path, **{"num-layers": 2, **keys})
    with pytest.raises(UserError, match=message):
        convert_neox_to_hf.main([*words, *options])
    assert not (tmp_path / "hf").exists()
