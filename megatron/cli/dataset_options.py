"""Command-line options shared by prepare_data.py and tools/datasets."""

import argparse
from collections.abc import Iterable

from megatron.utils.command_line import number
from megatron.utils.files import expanded_path


def split_words(values: Iterable[str]) -> list[str]:
    """Split values that are separated by commas as well as by spaces."""
    return [word for value in values for word in value.split(",") if word]


def split_paths(values: Iterable[str]) -> list[str]:
    """`split_words` of paths, with `~` and `$NAME` expanded. Raises UserError."""
    return [expanded_path(path) for path in split_words(values)]


def add_input_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --input, --suffixes and --bad-documents."""
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        help="files or folders, separated by commas or spaces: parquet, or jsonl, txt, and tar and "
        "zip of these, uncompressed or compressed (gz, zst, xz)",
    )
    parser.add_argument(
        "--suffixes",
        action="extend",
        nargs="+",
        default=[],
        metavar=".EXT",
        help="read source trees (folders or tars): files with these extensions, one document each "
        "(e.g. .c .h)",
    )
    add_bad_documents_argument(parser)


def add_bad_documents_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--bad-documents",
        choices=("fail", "skip"),
        default="fail",
        help="stop at documents that are not JSON, not UTF-8, or lack the key, or skip and count "
        "them (default: fail)",
    )


def add_limit_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--limit-mb",
        type=number(0, above=True),
        metavar="MB",
        help="use only the first MB of text, in whole documents; no effect on a single document "
        "such as enwik8 (default: all)",
    )
