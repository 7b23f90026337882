"""The command line of a script that deepy.py starts, such as train.py.

    SCRIPT [-d DIR] a.yml b.yml ... [--set key=value ...] [options of the script]     as a user
    writes it SCRIPT --neox-config WORD [options of the script]                                 as
    deepy.py starts it

WORD is the merged configuration, so the started processes do not read the files again.
"""

import argparse
import os
import sys
import zlib
from collections.abc import Callable, Sequence

from megatron.config import Config, load_config
from megatron.launcher.node import decode
from megatron.launcher.rank import check_starter, follow_launcher, set_rank_variables
from megatron.utils.command_line import (
    OptionParser,
    add_key_options,
    extract_overrides,
    path_option,
)
from megatron.utils.errors import UserError
from megatron.utils.progress import fitted

MERGED_CONFIG_OPTION = "--neox-config"


def parse_arguments(
    description: str,
    argv: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Read the command line of a script: returns the configuration and the parsed options.

    Rank 0 prints which keys are ignored or overridden. If Slurm or MPI started this process, the
    environment variables that torch.distributed reads are set from theirs.

    Args:
        argv: the words after the script's name; by default those of this process.
        add_options: adds the script's own options to the parser.

    Raises UserError if the configuration is wrong, or as `check_starter`. (An invalid option prints
    the usage and exits with status 2.)
    """
    if argv is None:
        argv = sys.argv[1:]
    overrides, words = extract_overrides(argv)
    parser = make_parser(description, add_options)
    options = parser.parse_intermixed_args(words)
    if options.neox_config is not None:
        if options.files or overrides:
            raise UserError(
                f"{MERGED_CONFIG_OPTION} is a complete configuration; remove the files and --set"
            )
        reject_config_options(options)
        config = decode_config(options.neox_config)
    else:
        if not options.files:
            parser.error("no configuration files were given")
        config = load_config(options.files, options.conf_dir, overrides)
        if "RANK" not in os.environ:
            check_starter(config, os.environ)
    become_rank(config, started_by_deepy=options.neox_config is not None)
    if options.neox_config is None and os.environ.get("RANK", "0") == "0":
        print_notices(config)
    if options.fallback:
        config = config.updated(fallback=True)
    return config, options


def become_rank(config: Config, *, started_by_deepy: bool = False) -> None:
    """If a launcher has started several processes, set the variables of this rank, and stop it with
    its launcher.
    """
    set_rank_variables(config, os.environ)
    if started_by_deepy or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        follow_launcher()


def make_parser(
    description: str,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
    prog: str | None = None,
) -> OptionParser:
    """The parser of a script's command line without the words that `extract_overrides` removes."""
    parser = OptionParser(prog=prog, description=description)
    parser.add_argument(
        "files", nargs="*", metavar="FILE.yml", help="configuration files; .yml may be omitted"
    )
    parser.add_argument(
        "-d",
        "--conf-dir",
        type=path_option,
        metavar="DIR",
        help="folder of the configuration files",
    )
    add_key_options(parser)
    parser.add_argument(MERGED_CONFIG_OPTION, help=argparse.SUPPRESS)
    parser.add_argument(
        "--fallback",
        action="store_true",
        help="if the checkpoint is damaged, load the newest intact one",
    )
    # Some launchers add this option; the rank itself is read from the environment.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    if add_options is not None:
        add_options(parser)
    return parser


def reject_config_options(options: argparse.Namespace) -> None:
    """Raises UserError if the options of a script that deepy.py starts contain -d, which deepy.py
    itself reads before the first option of the script.
    """
    if options.conf_dir:
        raise UserError(
            "-d comes directly after the script or the configuration files; move it before the "
            "other options"
        )


def print_notices(config: Config) -> None:
    """Print which keys of the configuration are ignored or overridden."""
    for notice in config.notices:
        print(fitted(f"note: {notice}"), flush=True)


def decode_config(word: str) -> Config:
    """The configuration whose keys deepy.py has encoded. Raises UserError for any other word."""
    try:
        flat = decode(word)
    except (zlib.error, ValueError) as error:
        raise UserError(
            f"{MERGED_CONFIG_OPTION}: not written by deepy.py; give configuration files instead"
        ) from error
    return Config.from_flat(flat, source=MERGED_CONFIG_OPTION)
