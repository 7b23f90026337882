"""The special tokens in a tokenizer_config.json."""

import json

import pytest

from megatron.tokenizer.interface import SpecialTokens
from tests.support.errors import assert_rejected


def test_tokens_as_text_and_as_dictionaries(tmp_path):
    assert SpecialTokens.next_to(tmp_path / "tokenizer.json") == SpecialTokens()
    values = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "add_bos_token": True,
        "added_tokens_decoder": {"0": {"content": "<unk>"}, "12": {"content": "</s>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    assert SpecialTokens.next_to(tmp_path / "tokenizer.json") == SpecialTokens(
        "<s>", "</s>", adds_bos=True, largest_id=12
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None, "bos_token": 5}))
    assert SpecialTokens.next_to(tmp_path / "tokenizer.json") == SpecialTokens()


@pytest.mark.parametrize("text", ["[1]", "{", '"a"', '{"added_tokens_decoder": {"x": 1}}'])
def test_other_files_are_rejected(text, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert_rejected(r"tokenizer_config\.json", SpecialTokens.next_to, tmp_path / "tokenizer.json")
