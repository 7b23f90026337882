"""Writing and reading the tokenizers of Hugging Face folders."""

import os
from pathlib import Path

import tokenizers

from megatron.checkpoint.storage import CheckpointError, write_json
from megatron.tokenizer import END_OF_DOCUMENT, Tokenizer, TokenizerFiles
from megatron.tokenizer.hugging_face import MAX_BYTES, read_gpt2_tokenizer
from megatron.utils.errors import UserError
from megatron.utils.files import read_file

# The character that represents byte 0 in GPT-2's byte-level alphabet.
NUL = "\u0100"


def write_tokenizer(files: TokenizerFiles, folder: Path, vocabulary: int) -> int:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer; return the end-of-document id.

    The end-of-document token is also the padding token; padding is on the left, as generation requires. `vocabulary` is
    the number of rows of the model's embedding. Raises UserError if the tokenizer is missing or has more tokens.
    """
    try:
        tokenizer = files.build()
    except UserError as error:
        raise UserError(f"{error} (or convert without a tokenizer: --no-tokenizer)") from error
    check_rows(tokenizer, vocabulary)
    if files.tokenizer_type == "HFTokenizer":
        converted = tokenizers.Tokenizer.from_file(str(files.vocab_file))  # `build` has checked it
        converted.no_truncation()
        converted.no_padding()
    elif files.tokenizer_type == "GPT2BPETokenizer":
        converted = _byte_level(tokenizers.models.BPE.from_file(str(files.vocab_file), str(files.merge_file)))
        converted.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    elif files.tokenizer_type == "HFGPT2Tokenizer":
        converted = read_gpt2_tokenizer(files.vocab_file or "gpt2")
    else:
        converted = _character_level()
    converted.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_DOCUMENT,
            "eos_token": END_OF_DOCUMENT,
            "pad_token": END_OF_DOCUMENT,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )
    return tokenizer.eod


def check_rows(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Raises CheckpointError if the tokenizer has more tokens than the model's embedding has rows."""
    if tokenizer.vocab_size > vocabulary:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has {vocabulary} rows; "
            "use the tokenizer that the model was trained with"
        )


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _character_level() -> tokenizers.Tokenizer:
    """CharLevelTokenizer as a BPE without merges: ids are bytes, and NUL, id 0, ends documents."""
    # GPT-2's visible characters for bytes: printable Latin-1 represents itself, the others are numbered from U+0100.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(0x100 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in printable)}
    del vocabulary[NUL]
    vocabulary[END_OF_DOCUMENT] = 0
    tokenizer = _byte_level(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    # The token is looked up in the normalized text, where it replaces NUL.
    tokenizer.normalizer = tokenizers.normalizers.Replace("\0", END_OF_DOCUMENT)
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=True)])
    return tokenizer


def copy_tokenizer(source: Path, folder: Path, final: Path, vocabulary: int) -> dict[str, str]:
    """Copy the tokenizer of a Hugging Face folder into `folder`; return the configuration keys for it, with the paths
    that the files will have in `final`. Raises UserError if there is no supported tokenizer.
    """
    if os.path.lexists(source / "tokenizer.json"):
        tokenizer_type, files = "HFTokenizer", {"vocab_file": "tokenizer.json"}
    elif os.path.lexists(source / "vocab.json") and os.path.lexists(source / "merges.txt"):
        tokenizer_type, files = "GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    else:
        raise CheckpointError(
            f"{source}: has neither tokenizer.json nor vocab.json and merges.txt; add them, or convert without a "
            "tokenizer: --no-tokenizer"
        )
    for name in files.values():
        (folder / name).write_bytes(read_file(source / name, MAX_BYTES))
    copied = TokenizerFiles(tokenizer_type, **{key: folder / name for key, name in files.items()})
    check_rows(copied.build(), vocabulary)
    return {"tokenizer_type": tokenizer_type, **{key: str(final / name) for key, name in files.items()}}


def special_ids(eod: int) -> dict[str, int]:
    """Special tokens in config.json and generation_config.json."""
    return {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}
