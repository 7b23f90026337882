"""tokenizer_config.json: the part of a Hugging Face tokenizer that its vocabulary file does not contain."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.utils.errors import UserError
from megatron.utils.files import read_file

TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer.

    Attributes:
        bos, eos, pad: text of the token at the beginning and end of a sequence, and of padding; None if the file names
            none.
        adds_bos: whether `bos` is put before every text (add_bos_token).
        largest_id: of the tokens added to the vocabulary; -1 if there are none.
    """

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    adds_bos: bool = False
    largest_id: int = -1

    @classmethod
    def next_to(cls, path: Path) -> "SpecialTokens":
        """Read the tokenizer_config.json in the folder of a vocabulary file; no special tokens without one. Raises
        UserError if it is not JSON of the expected form.
        """
        file = path.parent / TOKENIZER_CONFIG
        if not os.path.isfile(file):
            return cls()
        try:
            values = json.loads(read_file(file, MAX_BYTES))
            added = [int(number) for number in values.get("added_tokens_decoder") or {}]
            bos, eos, pad = (_text(values.get(name)) for name in ("bos_token", "eos_token", "pad_token"))
            adds_bos = bool(values.get("add_bos_token"))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} is not a {TOKENIZER_CONFIG} of transformers: {error}") from error
        return cls(bos, eos, pad, adds_bos, max(added, default=-1))


def _text(token: Any) -> str | None:
    """The text of a token, which is stored as such or as a dictionary with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
