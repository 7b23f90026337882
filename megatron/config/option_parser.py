"""Command-line options whose names are read as configuration keys are: `-` and `_` are the same."""

import argparse
import sys
from collections.abc import Sequence


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, to which `--query_chunk` is `--query-chunk`, whichever was declared; without abbreviations.

    Help and messages show what was declared: dashes, throughout this project.
    """

    def __init__(self, *arguments, allow_abbrev: bool = False, **more):
        super().__init__(*arguments, allow_abbrev=allow_abbrev, **more)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None):
        return super().parse_known_args(self._as_declared(args), namespace)

    def parse_known_intermixed_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ):
        return super().parse_known_intermixed_args(self._as_declared(args), namespace)

    def _as_declared(self, args: Sequence[str] | None) -> list[str]:
        """The words with every known option as it was declared, up to `--`, behind which there are none."""
        words = list(sys.argv[1:] if args is None else args)
        declared = {_canonical(name): name for name in self._option_string_actions}
        for index, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            words[index] = declared.get(_canonical(name), name) + equals + value
        return words


def option_name(stored: str) -> str:
    """The option whose value argparse stores as `stored`: query_chunk -> --query-chunk."""
    return "--" + stored.replace("_", "-")


def _canonical(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name
