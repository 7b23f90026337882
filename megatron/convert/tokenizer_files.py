"""Writing and reading the tokenizers of Hugging Face folders."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from megatron.checkpoint.storage import CheckpointError, read_json, write_json
from megatron.tokenizer.hugging_face import (
    SAMPLE,
    byte_level_tokenizer,
    disable_effects,
    sample_texts,
)
from megatron.tokenizer.interface import END_OF_DOCUMENT, TOKENIZER_CONFIG, SpecialTokens, Tokenizer
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError, first_line
from megatron.utils.files import read_file

# Key of config.json: the `digest_of_ids` of the tokenizer in the folder.
TOKENIZER_IDS = "tokenizer_ids_sha256"
TOKENS_PER_TEXT = 64
SENTENCEPIECE_UNKNOWN = "\u2047"

# Special tokens in config.json and generation_config.json.
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Tokens that are not in the vocabulary file, in folders of transformers 4: name -> id.
ADDED_TOKENS = "added_tokens.json"
# Keys of tokenizer_config.json -> values with which vocab.json and merges.txt are GPT-2's.
GPT2_KEYS: dict[str, tuple[str, ...]] = {
    "tokenizer_class": ("GPT2Tokenizer", "GPTNeoXTokenizer"),
    "add_prefix_space": (),
    "add_bos_token": (),
}

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

    # The tokenizer as an object of `tokenizers`.
    if files.tokenizer_type == "SPMTokenizer":
        loaded = _write_sentencepiece(files, tokenizer, folder)
        return _with_own_tokens(files, tokenizer, loaded.get_vocab().get)
    if files.tokenizer_type == "HFTokenizer":
        converted = tokenizers.Tokenizer.from_file(str(files.vocab_file))  # `build` has checked it
        disable_effects(converted)
    elif files.tokenizer_type == "GPT2BPETokenizer":
        bpe = tokenizers.models.BPE.from_file(str(files.vocab_file), str(files.merge_file))
        converted = byte_level_tokenizer(bpe)
        end = tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)
        converted.add_special_tokens([end])
    else:
        converted = _character_level()

    # It adds no token to a text but the one at the beginning.
    start = []
    if tokenizer.bos is not None:
        start.append(str(converted.id_to_token(tokenizer.bos)))
    if converted.num_special_tokens_to_add(is_pair=False) > len(start):
        converted.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*start, "$A"],
            pair=[*start, "$A", "$B:1"],
            special_tokens=[(token, tokenizer.bos) for token in start],
        )
    converted.save(str(folder / "tokenizer.json"))
    end_token = converted.id_to_token(tokenizer.eod) or END_OF_DOCUMENT
    _write_config(files, folder, "PreTrainedTokenizerFast", end_token)
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
        if special.pad is not None and (pad := id_of(special.pad)) is not None:
            ids["pad_token_id"] = pad
        if special.eos is not None and (eos := id_of(special.eos)) not in (None, tokenizer.eod):
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
        # transformers must give the same ids for a text.
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
    """Raises CheckpointError if the tokenizer has more tokens than the embedding has rows."""
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
    others = (byte for byte in range(256) if byte not in printable)
    for number, byte in enumerate(others, start=0x100):
        vocabulary[chr(number)] = byte
    del vocabulary["\u0100"]  # NUL
    vocabulary[END_OF_DOCUMENT] = 0
    tokenizer = byte_level_tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    # The token is looked up in the normalized text, where it replaces NUL.
    tokenizer.normalizer = tokenizers.normalizers.Replace("\0", END_OF_DOCUMENT)
    end = tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=True)
    tokenizer.add_special_tokens([end])
    return tokenizer


def find_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of a Hugging Face folder. Raises CheckpointError if there is none."""
    if os.path.lexists(folder / "tokenizer.json"):
        return TokenizerFiles("HFTokenizer", folder / "tokenizer.json")
    merges = folder / "merges.txt"
    if os.path.lexists(folder / "vocab.json") and os.path.lexists(merges):
        return TokenizerFiles("GPT2BPETokenizer", folder / "vocab.json", merges)
    if os.path.lexists(folder / "tokenizer.model"):
        return TokenizerFiles("SPMTokenizer", folder / "tokenizer.model")
    raise CheckpointError(
        f"{folder}: has neither tokenizer.json, nor tokenizer.model, nor vocab.json and "
        "merges.txt; add them, or convert without a tokenizer: --no-tokenizer"
    )


def copy_tokenizer(
    source: Path, folder: Path, final: Path, vocabulary: int, exported: str | None
) -> tuple[dict[str, str], str]:
    """Copy the tokenizer of a Hugging Face folder into `folder`; return the configuration keys for
    it, with the paths that the files will have in `final`, and its fingerprint.

    exported: the `TOKENIZER_IDS` of the folder's config.json. Raises CheckpointError if there is no
    supported tokenizer, or one that gives other ids than the exported one.
    """
    found = find_tokenizer(source)
    keys = {"tokenizer_type": found.tokenizer_type}
    for key, path in (("vocab_file", found.vocab_file), ("merge_file", found.merge_file)):
        if path is not None:
            name = Path(path).name
            (folder / name).write_bytes(read_file(source / name))
            keys[key] = str(final / name)
    for name in OTHER_FILES:
        if os.path.lexists(source / name):
            (folder / name).write_bytes(read_file(source / name))
    tokenizer = find_tokenizer(folder).build()
    check_rows(tokenizer, vocabulary)
    _check_complete(source, found, tokenizer)
    if exported not in (None, digest_of_ids(tokenizer)):
        raise CheckpointError(
            f"{found.vocab_file}: gives other ids than the tokenizer that was exported with the "
            "model; restore the file, or, if the model was trained further with this tokenizer, "
            f"remove {TOKENIZER_IDS} from config.json"
        )
    return keys, tokenizer.fingerprint


def _check_complete(folder: Path, found: TokenizerFiles, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError if other files of a Hugging Face folder add tokens to the vocabulary,
    or split texts in another way than GPT-2, which `tokenizer` does not know of.
    """
    # The largest id that any file of the folder names.
    largest = SpecialTokens.next_to(folder / TOKENIZER_CONFIG).largest_id
    if os.path.lexists(folder / ADDED_TOKENS):
        ids = read_json(folder / ADDED_TOKENS).values()
        largest = max([largest, *(number for number in ids if isinstance(number, int))])
    reason = ""
    if largest >= tokenizer.vocab_size:
        reason = f"has no token {largest}, which {TOKENIZER_CONFIG} or {ADDED_TOKENS} adds"
    elif found.tokenizer_type == "GPT2BPETokenizer" and os.path.lexists(folder / TOKENIZER_CONFIG):
        values = read_json(folder / TOKENIZER_CONFIG)
        for key, own in GPT2_KEYS.items():
            value = values.get(key)
            if value and str(value).removesuffix("Fast") not in own:
                reason = f"is not read as GPT-2's, but with {key} {value}"
    if reason:
        raise CheckpointError(
            f"{found.vocab_file}: {reason}; write all of the tokenizer to tokenizer.json: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )


def digest_of_ids(tokenizer: Tokenizer) -> str:
    """SHA-256 (hexadecimal) of the ids that a tokenizer gives for the texts of all its tokens, and
    of the names and ids of its special tokens.

    A tokenizer that transformers has written anew, in another format, has the same digest; one with
    another vocabulary, other merges, special tokens or another normalization has another, unless
    that changes some rare sequence of characters only.
    """
    # Only some libraries recognize special tokens in a text, and white space alone.
    special = set(tokenizer.special_ids)
    pieces = []
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.detokenize([token])
        if token not in special and piece.strip() not in ("", SENTENCEPIECE_UNKNOWN):
            pieces.append(piece)
    texts = sample_texts()
    for start in range(0, len(pieces), TOKENS_PER_TEXT):
        some = pieces[start : start + TOKENS_PER_TEXT]
        texts += ["".join(some), " ".join(some)]
    texts = [text for text in texts if tokenizer.problem(text) is None]
    names = sorted(tokenizer.special_tokens.items())
    digest = hashlib.sha256(f"{tokenizer.eod} {tokenizer.bos} {names}".encode())
    for ids in tokenizer.tokenize_batch(texts):
        digest.update(np.array([*ids, -1], dtype=np.int64).tobytes())
    return digest.hexdigest()
