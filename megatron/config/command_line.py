"""Command lines of the entry points and tools: option parser, options that set keys, errors as one line.

SCRIPT [-d DIR] a.yml b.yml ... [--set key=value ...] [options of the script]
"""

import argparse
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron.utils.errors import UserError, first_line

SET_OPTION = "--set"
# GPT-NeoX's options that set a key: option -> key.
KEY_OPTIONS = {
    "--hostfile": "hostfile",
    "-H": "hostfile",
    "--wandb-group": "wandb_group",
    "--wandb-team": "wandb_team",
    "--wandb-run-name": "wandb_run_name",
}
EXIT_STATUS_OF_USER_ERROR = 2
EXIT_STATUS_OF_LOST_CONNECTION = 3
# In the messages of gloo and NCCL after another rank has ended.
_LOST_CONNECTION = re.compile(r"Connection (closed|reset) by peer|Broken pipe|remote process exit", re.I)


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, without abbreviations, in which `--query_chunk` and `--query-chunk` are the same option.

    Help texts and messages show the declared spelling, which has dashes throughout this project.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    # The base class declares overloads by the type of `namespace`, hence the ignored errors.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_args(self._with_declared_spelling(args), namespace)

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super().parse_known_intermixed_args(self._with_declared_spelling(args), namespace)

    def _with_declared_spelling(self, args: Sequence[str] | None) -> list[str]:
        """The words with every known option in its declared spelling, up to `--`, which ends the options."""
        words = list(sys.argv[1:] if args is None else args)
        declared = {_with_dashes(name): name for name in self._option_string_actions}
        for index, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            words[index] = declared.get(_with_dashes(name), name) + equals + value
        return words


def _with_dashes(option: str) -> str:
    return option.replace("_", "-") if option.startswith("--") else option


def option_name(attribute: str) -> str:
    """The option whose value argparse stores as `attribute`: query_chunk -> --query-chunk."""
    return "--" + attribute.replace("_", "-")


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `extract_overrides` removes, for the help text."""
    parser.add_argument(SET_OPTION, metavar="KEY=VALUE", help="override keys (nested ones with dots); repeatable")
    for key in dict.fromkeys(KEY_OPTIONS.values()):
        names = sorted(name for name in KEY_OPTIONS if KEY_OPTIONS[name] == key)
        parser.add_argument(*names, metavar="VALUE", help=f"same as --set {key}=VALUE")


def extract_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove every `--set key=value ...` and every `KEY_OPTIONS` option from a command line.

    Returns (overrides of the form key=value, remaining words). --set ends at the first word that is not of the form
    key=value, so files may follow it. Raises UserError if an option is not followed by its value.
    """
    overrides: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        key = KEY_OPTIONS.get(_with_dashes(option))
        if key is not None:
            if not equals and not queue:
                raise UserError(f"{word} is the last word; it must be followed by the value of {key}")
            overrides.append(f"{key}={json.dumps(value if equals else queue.pop(0))}")
            continue
        if word != SET_OPTION:
            rest.append(word)
            continue
        count = len(overrides)
        while queue and not queue[0].startswith("-") and "=" in queue[0]:
            overrides.append(queue.pop(0))
        if len(overrides) == count:
            problem = f"is followed by {queue[0]!r}" if queue else "is the last word"
            raise UserError(f"--set {problem}; expected key=value ..., such as --set train-iters=100 save=runs/a")
    return overrides, rest


def run_main(main: Callable[[], int | None]) -> int:
    """Run an entry point and return its exit status. A UserError is printed as one line, with status 2; so is the error
    of a rank that lost the connection to another one, with status 3.
    """
    try:
        return main() or 0
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        prefix = "error" if rank == "0" else f"error on rank {rank}"
        print(f"{prefix}: {error}", file=sys.stderr, flush=True)
        return EXIT_STATUS_OF_USER_ERROR
    except RuntimeError as error:
        if "RANK" not in os.environ or _LOST_CONNECTION.search(str(error)) is None:
            raise
        text = (
            f"rank {os.environ['RANK']} on {socket.gethostname()} stops: another rank has ended; its messages say why"
        )
        print(f"{text} ({first_line(error).partition('. ')[0]})", file=sys.stderr, flush=True)
        return EXIT_STATUS_OF_LOST_CONNECTION
