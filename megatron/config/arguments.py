"""The command line of a script: configuration files, overrides, and options of its own."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from megatron.config.command_line import MERGED_OPTION, SET_OPTION, decode, take_overrides
from megatron.config.loader import Config, load_config
from megatron.config.option_parser import OptionParser
from megatron.launcher.ranks import adopt_ranks
from megatron.utils.errors import UserError

USER_ERROR = 2


def parse(
    description: str,
    argv: Sequence[str] | None = None,
    extra: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Read a script's command line: files as a user gives them, or the merged configuration deepy.py hands over.

    argv: the words after the script's name; default: this process's.
    extra: adds the script's own options to the parser.
    Returns the configuration and the parsed options (the extra ones among them). Says once, on rank 0, which keys have
    no effect. Raises UserError for a bad configuration; a bad option ends the process with the usage, status 2.
    """
    overrides, words = take_overrides(sys.argv[1:] if argv is None else argv)
    parser = OptionParser(description=description)
    parser.add_argument("files", nargs="*", metavar="FILE.yml", help="configuration files; .yml may be left out")
    parser.add_argument("-d", "--conf-dir", metavar="DIR", help="folder of the configuration files")
    parser.add_argument(SET_OPTION, metavar="KEY=VALUE", help="override keys; nested ones with dots; may be repeated")
    parser.add_argument(MERGED_OPTION, help=argparse.SUPPRESS)
    parser.add_argument("--fallback", action="store_true", help="checkpoint damaged: take the newest whole one")
    # Some launchers add this option; the rank itself is read from the environment.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    if extra is not None:
        extra(parser)
    options = parser.parse_intermixed_args(words)
    if options.neox_config is not None:
        if options.files or overrides:
            raise UserError(f"{MERGED_OPTION} holds the whole configuration; give no files and no --set with it")
        config = decode(options.neox_config)
    else:
        if not options.files:
            parser.error("no configuration files were given")
        config = load_config(options.files, options.conf_dir, overrides)
        if os.environ.get("RANK", "0") == "0":
            print_notices(config)
    if options.fallback:
        config = config.updated(fallback=True)
    adopt_ranks(config, os.environ)
    return config, options


def print_notices(config: Config) -> None:
    """Tell the user, once, which keys were accepted without effect."""
    for notice in config.notices:
        print(f"note: {notice}", flush=True)


def run_main(main: Callable[[], int | None]) -> int:
    """Run an entry point: its exit status, or 2 after printing a UserError as one line."""
    try:
        return main() or 0
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
