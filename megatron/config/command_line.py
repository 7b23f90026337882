"""What the command lines of deepy.py and of the scripts have in common.

    SCRIPT [-d DIR] a.yml b.yml ... [--set key=value ...] [the script's own options]

deepy.py hands the merged configuration to the processes it starts as one argument, so that they need none of the files.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence

from megatron.config.loader import Config
from megatron.utils.errors import UserError

MERGED_OPTION = "--neox-config"
SET_OPTION = "--set"


def take_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take every `--set key=value ...` out of a command line: (overrides, the rest).

    --set ends at the first word that is not of the form key=value, so files may follow it.
    Raises UserError if nothing of that form follows.
    """
    overrides: list[str] = []
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word != SET_OPTION:
            rest.append(word)
            continue
        if not words or words[0].startswith("-") or "=" not in words[0]:
            followed = f"is followed by {words[0]!r}" if words else "is the last word"
            raise UserError(f"--set {followed}; it takes key=value ..., such as --set train-iters=100 save=runs/a")
        while words and not words[0].startswith("-") and "=" in words[0]:
            overrides.append(words.pop(0))
    return overrides, rest


def encode(config: Config) -> str:
    """The keys that were set, as one word of letters, digits, `-`, `_` and `=`."""
    text = json.dumps(config.to_flat(), separators=(",", ":"))
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()


def decode(word: str) -> Config:
    """What `encode` made. Raises UserError if the word is something else."""
    try:
        flat = json.loads(zlib.decompress(base64.urlsafe_b64decode(word.encode())))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(f"{MERGED_OPTION}: is not what deepy.py makes; give configuration files instead") from error
    return Config.from_flat(flat, source=MERGED_OPTION)
