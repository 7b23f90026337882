"""Writing and reading the tokenizers of Hugging Face folders."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from megatron.checkpoint.storage import CheckpointError, read_json, write_json
from megatron.tokenizer.hugging_face import byte_level_tokenizer, disable_effects
from megatron.tokenizer.interface import END_OF_DOCUMENT, TOKENIZER_CONFIG, SpecialTokens, Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import read_file

# The character that represents byte 0 in GPT-2's byte-level alphabet.
NUL = "\u0100"

# A SentencePiece model is only exported if transformers gives the same ids for this text.
SAMPLE = (
    "def main(count=10):\n\treturn [x * 3.14 for x in range(count)]  # naïve – 東京 🙂\n\n"
    "  The  end."
)

# Special tokens in config.json and generation_config.json.
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Files of a Hugging Face tokenizer that `copy_tokenizer` copies along with the vocabulary.
OTHER_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer(
    files: TokenizerFiles, folder: Path, vocabulary: int
) -> dict[str, int | list[int]]:
    """Write a tokenizer for AutoTokenizer: tokenizer.json (or tokenizer.model) and
    tokenizer_config.json; return the special tokens for config.json.

    If the vocabulary file has a tokenizer_config.json in its folder, that is used. Otherwise the
    end-of-document token is also the padding token, and padding is on the left, as generation
    requires. Tokens that the original puts after every text are left out, as in training.
    `vocabulary` is the number of rows of the model's embedding. Raises UserError if the tokenizer
    is missing or has more tokens, or if transformers cannot represent it.
    """
    try:
        tokenizer = files.build()
    except UserError as error:
        raise UserError(f"{error} (or convert without a tokenizer: --no-tokenizer)") from error
    check_rows(tokenizer, vocabulary)
    if files.tokenizer_type == "SPMTokenizer":
        loaded = _write_sentencepiece(files, tokenizer, folder)
        return _with_own_tokens(files, tokenizer, loaded.get_vocab().get)
    if files.tokenizer_type == "HFTokenizer":
        converted = tokenizers.Tokenizer.from_file(str(files.vocab_file))  # `build` has checked it
        disable_effects(converted)
    elif files.tokenizer_type == "GPT2BPETokenizer":
        converted = byte_level_tokenizer(
            tokenizers.models.BPE.from_file(str(files.vocab_file), str(files.merge_file))
        )
        converted.add_special_tokens(
            [tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)]
        )
    else:
        converted = _character_level()
    if converted.num_special_tokens_to_add(is_pair=False) > (tokenizer.bos is not None):
        start = [] if tokenizer.bos is None else [str(converted.id_to_token(tokenizer.bos))]
        converted.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*start, "$A"],
            pair=[*start, "$A", "$B:1"],
            special_tokens=[(token, tokenizer.bos) for token in start],
        )
    converted.save(str(folder / "tokenizer.json"))
    _write_config(
        files,
        folder,
        "PreTrainedTokenizerFast",
        converted.id_to_token(tokenizer.eod) or END_OF_DOCUMENT,
    )
    return _with_own_tokens(files, tokenizer, converted.token_to_id)


def _with_own_tokens(
    files: TokenizerFiles, tokenizer: Tokenizer, id_of: Callable[[str], int | None]
) -> dict[str, int | list[int]]:
    """The special tokens, with the padding token and a further end token (of a chat model, say) of
    the tokenizer_config.json next to the vocabulary file.
    """
    ids: dict[str, int | list[int]] = dict.fromkeys(SPECIAL_IDS, tokenizer.eod)
    ids["bos_token_id"] = tokenizer.first
    if files.tokenizer_type in ("HFTokenizer", "SPMTokenizer"):
        special = SpecialTokens.next_to(Path(files.vocab_file or ""))
        pad = None if special.pad is None else id_of(special.pad)
        eos = None if special.eos is None else id_of(special.eos)
        ids["pad_token_id"] = tokenizer.eod if pad is None else pad
        if eos not in (None, tokenizer.eod):
            ids["eos_token_id"] = [eos, tokenizer.eod]
    return ids


def _write_config(
    files: TokenizerFiles, folder: Path, tokenizer_class: str, eos: str, **keys: Any
) -> None:
    original = Path(files.vocab_file or "").parent / TOKENIZER_CONFIG
    if files.tokenizer_type in ("HFTokenizer", "SPMTokenizer") and os.path.isfile(original):
        for name in OTHER_FILES:
            if os.path.isfile(original.parent / name):
                (folder / name).write_bytes(read_file(original.parent / name))
        values = read_json(original)
        values.pop("auto_map", None)  # names code, which is not copied
        values.pop("add_eos_token", None)
        write_json(folder / TOKENIZER_CONFIG, values)
        return
    values = {
        "tokenizer_class": tokenizer_class,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), eos),
    }
    values |= {"padding_side": "left", "clean_up_tokenization_spaces": False}
    write_json(
        folder / TOKENIZER_CONFIG,
        {**values, "model_input_names": ["input_ids", "attention_mask"], **keys},
    )


def _write_sentencepiece(files: TokenizerFiles, tokenizer: Tokenizer, folder: Path) -> Any:
    """Copy the model, which transformers reads with its LlamaTokenizer; return that."""
    import sentencepiece

    (folder / "tokenizer.model").write_bytes(read_file(str(files.vocab_file)))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    keys: dict[str, Any] = {
        "add_bos_token": tokenizer.bos is not None,
        "add_eos_token": False,
        "legacy": False,
    }
    keys["unk_token"] = processor.id_to_piece(processor.unk_id())
    if processor.bos_id() >= 0:
        keys["bos_token"] = processor.id_to_piece(processor.bos_id())
    _write_config(files, folder, "LlamaTokenizer", processor.id_to_piece(tokenizer.eod), **keys)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
        ids = loaded(SAMPLE)["input_ids"]
    except Exception as error:  # transformers converts the model, which can fail in many ways
        raise CheckpointError(
            f"{files.vocab_file}: transformers cannot read it ({first_line(error)}); convert "
            "without a tokenizer: --no-tokenizer"
        ) from error
    if ids != tokenizer.tokenize(SAMPLE):
        raise CheckpointError(
            f"{files.vocab_file}: transformers' LlamaTokenizer gives other ids than sentencepiece, "
            "because the model is not of Llama's kind (BPE without normalization); convert without "
            "a tokenizer: --no-tokenizer"
        )
    return loaded


def check_rows(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Raises CheckpointError if the tokenizer has more tokens than the model's
    embedding has rows.
    """
    if tokenizer.vocab_size > vocabulary:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has "
            f"{vocabulary} rows; use the tokenizer that the model was trained with"
        )


def _character_level() -> tokenizers.Tokenizer:
    """CharLevelTokenizer as a BPE without merges: ids are bytes, and NUL, id 0, ends documents."""
    # GPT-2's visible characters for bytes: printable Latin-1 represents itself, the others are
    # numbered from U+0100.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {
        chr(0x100 + n): byte
        for n, byte in enumerate(byte for byte in range(256) if byte not in printable)
    }
    del vocabulary[NUL]
    vocabulary[END_OF_DOCUMENT] = 0
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    # The token is looked up in the normalized text, where it replaces NUL.
    tokenizer.normalizer = tokenizers.normalizers.Replace("\0", END_OF_DOCUMENT)
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=True)]
    )
    return tokenizer


def copy_tokenizer(
    source: Path, folder: Path, final: Path, vocabulary: int
) -> tuple[dict[str, str], str]:
    """Copy the tokenizer of a Hugging Face folder into `folder`; return the configuration keys for
    it, with the paths that the files will have in `final`, and its fingerprint. Raises UserError if
    there is no supported tokenizer.
    """
    if os.path.lexists(source / "tokenizer.json"):
        tokenizer_type, files = "HFTokenizer", {"vocab_file": "tokenizer.json"}
    elif os.path.lexists(source / "vocab.json") and os.path.lexists(source / "merges.txt"):
        tokenizer_type, files = (
            "GPT2BPETokenizer",
            {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        )
    elif os.path.lexists(source / "tokenizer.model"):
        tokenizer_type, files = "SPMTokenizer", {"vocab_file": "tokenizer.model"}
    else:
        raise CheckpointError(
            f"{source}: has neither tokenizer.json, nor tokenizer.model, nor vocab.json and "
            "merges.txt; add them, or convert without a tokenizer: --no-tokenizer"
        )
    for name in (
        *files.values(),
        *(other for other in OTHER_FILES if os.path.lexists(source / other)),
    ):
        (folder / name).write_bytes(read_file(source / name))
    copied = TokenizerFiles(tokenizer_type, **{key: folder / name for key, name in files.items()})
    tokenizer = copied.build()
    check_rows(tokenizer, vocabulary)
    keys = {
        "tokenizer_type": tokenizer_type,
        **{key: str(final / name) for key, name in files.items()},
    }
    return keys, tokenizer.fingerprint
