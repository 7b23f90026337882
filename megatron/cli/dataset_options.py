"""What the command-line tools for data share."""

import argparse
import sys
from collections.abc import Callable, Iterable

from megatron.config.command_line import OptionParser, run_main

INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


def run_tool(main: Callable[[], int | None]) -> int:
    """`run_main`, with one line instead of a traceback on Ctrl-C too."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # names of files, which messages tell, need not be UTF-8
    try:
        return run_main(main)
    except KeyboardInterrupt as interruption:
        message = f"interrupted; {interruption}" if str(interruption) else "interrupted"
        print(message, file=sys.stderr, flush=True)
        return INTERRUPTED


def words(groups: Iterable[str]) -> list[str]:
    """What was separated by commas as well as by spaces."""
    return [word for group in groups for word in group.split(",") if word]


def add_tokenizer_arguments(parser, required: bool = True) -> None:
    """--tokenizer-type, --vocab-file and --merge-file, as GPT-NeoX names them."""
    names = "HFTokenizer, GPT2BPETokenizer, CharLevelTokenizer"
    parser.add_argument("--tokenizer-type", required=required, help=names)
    parser.add_argument("--vocab-file", help="vocabulary (GPT-2's JSON) or tokenizer.json")
    parser.add_argument("--merge-file", help="merges of GPT-2's BPE")


def add_input_arguments(parser) -> None:
    """What `find_files` and `Corpus` take."""
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        help="files or folders, local or on an object store (s3://...), separated by commas or spaces: jsonl, txt, "
        "parquet, lm-dataformat archives, tar and zip of these, plain or compressed (gz, zst, xz)",
    )
    parser.add_argument(
        "--suffixes",
        action="extend",
        nargs="+",
        default=[],
        metavar=".EXT",
        help="read trees or tars of source files: those with these endings, one document each (e.g. .c .h)",
    )
    parser.add_argument(
        "--bad-documents",
        choices=("fail", "skip"),
        default="fail",
        help="what to do about a line that is not JSON, lacks the key or is not UTF-8 (default: fail)",
    )


def new_parser(description: str) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring as it is written."""
    return OptionParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
