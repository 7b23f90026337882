"""Tokenizers for Hugging Face folders, and from them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from megatron.checkpoint.storage import CheckpointError, write_json
from megatron.config import Config, UserError
from megatron.tokenizer import END_OF_DOCUMENT, Tokenizer, build_tokenizer

# Of a byte-level alphabet, the character that stands for the byte NUL.
NUL = "\u0100"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer by the configuration's keys."""

    tokenizer_type: str
    vocab_file: str | Path | None = None
    merge_file: str | Path | None = None

    @classmethod
    def of(
        cls, config: Config, vocab_file: str | Path | None = None, merge_file: str | Path | None = None
    ) -> "TokenizerFiles":
        """The configuration's tokenizer; files given here stand in for the ones it names."""
        named = config.tokenizer
        return cls(named.tokenizer_type, vocab_file or named.vocab_file, merge_file or named.merge_file)

    def build(self) -> Tokenizer:
        """Raises UserError if a file is missing or is not what it should be."""
        return build_tokenizer(self.tokenizer_type, self.vocab_file, self.merge_file)


def write_tokenizer(files: TokenizerFiles, folder: Path, vocabulary: int) -> int:
    """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer reads; returns the end-of-document id.

    The end-of-document token also pads, on the left, as generation needs it. `vocabulary` is the number of rows of the
    model's embedding. Raises UserError for a tokenizer that is not there, or has more tokens.
    """
    try:
        ours = files.build()
    except UserError as error:
        raise UserError(f"{error} (or convert without a tokenizer: --no-tokenizer)") from error
    check_rows(ours, vocabulary)
    theirs = _as_library_tokenizer(files)
    theirs.save(str(folder / "tokenizer.json"))
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
    return ours.eod


def check_rows(tokenizer: Tokenizer, vocabulary: int) -> None:
    """Raises CheckpointError if the tokenizer has more tokens than the model has rows for."""
    if tokenizer.vocab_size > vocabulary:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's embedding has {vocabulary} rows; "
            "give the tokenizer that the model was trained with"
        )


def _as_library_tokenizer(files: TokenizerFiles) -> tokenizers.Tokenizer:
    if files.tokenizer_type == "HFTokenizer":
        tokenizer = tokenizers.Tokenizer.from_file(str(files.vocab_file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    if files.tokenizer_type == "GPT2BPETokenizer":
        tokenizer = _byte_level(tokenizers.models.BPE.from_file(str(files.vocab_file), str(files.merge_file)))
        tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        return tokenizer
    return _character_level()


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _character_level() -> tokenizers.Tokenizer:
    """CharLevelTokenizer as a BPE without merges: the ids are the bytes, and NUL, id 0, ends documents."""
    symbols = {symbol: byte for byte, symbol in _byte_symbols().items()}
    del symbols[NUL]
    vocabulary = {**symbols, END_OF_DOCUMENT: 0}
    tokenizer = _byte_level(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    # The token is sought in the normalized text, where it has taken NUL's place.
    tokenizer.normalizer = tokenizers.normalizers.Replace("\0", END_OF_DOCUMENT)
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=True)])
    return tokenizer


def _byte_symbols() -> dict[int, str]:
    """GPT-2's visible stand-in for every byte: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + n) for n, byte in enumerate(others)}}


def take_tokenizer(source: Path, folder: Path, final: Path, vocabulary: int) -> dict[str, str]:
    """Copy a Hugging Face folder's tokenizer into `folder`; returns the configuration's keys, with the paths that the
    files will have in `final`. Raises UserError if there is none that this project reads.
    """
    if (source / "tokenizer.json").is_file():
        found = {"vocab_file": "tokenizer.json"}
        kind = "HFTokenizer"
    elif (source / "vocab.json").is_file() and (source / "merges.txt").is_file():
        found = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
        kind = "GPT2BPETokenizer"
    else:
        raise CheckpointError(
            f"{source}: has neither tokenizer.json nor vocab.json and merges.txt; put them there, or convert without a "
            "tokenizer: --no-tokenizer"
        )
    for name in found.values():
        shutil.copyfile(source / name, folder / name)
    check_rows(build_tokenizer(kind, **{key: folder / name for key, name in found.items()}), vocabulary)
    return {"tokenizer_type": kind, **{key: str(final / name) for key, name in found.items()}}


def special_ids(eod: int) -> dict[str, int]:
    """What config.json and generation_config.json say of the end-of-document token."""
    return {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}


def read_json(path: Path) -> dict:
    """Raises CheckpointError if the file is missing or is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value
