"""The command line of a script that deepy.py starts, such as train.py.

    SCRIPT [-d DIR] a.yml b.yml ... [--set key=value ...] [options of the script]     as a user writes it
    SCRIPT --neox-config WORD [options of the script]                                 as deepy.py starts it

WORD is the merged configuration, so the started processes do not read the files again.
"""

import argparse
import base64
import binascii
import json
import os
import sys
import zlib
from collections.abc import Callable, MutableMapping, Sequence

from megatron.config import Config, load_config
from megatron.config.command_line import OptionParser, add_key_options, extract_overrides
from megatron.utils.errors import UserError

MERGED_CONFIG_OPTION = "--neox-config"
STRICT_OPTION = "--strict"
DEFAULT_PORT = 29500

# Rank, rank on this node and number of processes, as srun and the MPI launchers pass them.
_SLURM_VARIABLES = (("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),)
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)


def parse_arguments(
    description: str,
    argv: Sequence[str] | None = None,
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Config, argparse.Namespace]:
    """Read the command line of a script: returns the configuration and the parsed options.

    Rank 0 prints which keys are ignored or overridden. If Slurm or MPI started this process, the environment variables
    that torch.distributed reads are set from theirs.

    Args:
        argv: the words after the script's name; by default those of this process.
        add_options: adds the script's own options to the parser.

    Raises:
        UserError: the configuration is wrong. (An invalid option prints the usage and exits with status 2.)
    """
    overrides, words = extract_overrides(sys.argv[1:] if argv is None else argv)
    parser = OptionParser(description=description)
    parser.add_argument("files", nargs="*", metavar="FILE.yml", help="configuration files; .yml may be omitted")
    parser.add_argument("-d", "--conf-dir", metavar="DIR", help="folder of the configuration files")
    add_key_options(parser)
    parser.add_argument(STRICT_OPTION, action="store_true", help="reject keys that appear in two configuration files")
    parser.add_argument(MERGED_CONFIG_OPTION, help=argparse.SUPPRESS)
    parser.add_argument(
        "--fallback", action="store_true", help="if the checkpoint is damaged, load the newest intact one"
    )
    # Some launchers add this option; the rank itself is read from the environment.
    parser.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)
    if add_options is not None:
        add_options(parser)
    options = parser.parse_intermixed_args(words)
    if options.neox_config is not None:
        if options.files or overrides:
            raise UserError(f"{MERGED_CONFIG_OPTION} is a complete configuration; remove the files and --set")
        config = decode_config(options.neox_config)
    else:
        if not options.files:
            parser.error("no configuration files were given")
        config = load_config(options.files, options.conf_dir, overrides, strict=options.strict)
        if os.environ.get("RANK", "0") == "0":
            print_notices(config)
    if options.fallback:
        config = config.updated(fallback=True)
    set_rank_variables(config, os.environ)
    return config, options


def print_notices(config: Config) -> None:
    """Print which keys of the configuration are ignored or overridden."""
    for notice in config.notices:
        print(f"note: {notice}", flush=True)


def encode_config(config: Config) -> str:
    """The keys that were set, as one word that is safe in any shell: letters, digits, `-`, `_` and `=`."""
    text = json.dumps(config.to_flat(), separators=(",", ":"))
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()


def decode_config(word: str) -> Config:
    """The inverse of `encode_config`. Raises UserError for any other word."""
    try:
        flat = json.loads(zlib.decompress(base64.urlsafe_b64decode(word.encode())))
    except (binascii.Error, zlib.error, ValueError) as error:
        raise UserError(f"{MERGED_CONFIG_OPTION}: not written by deepy.py; give configuration files instead") from error
    return Config.from_flat(flat, source=MERGED_CONFIG_OPTION)


def set_rank_variables(config: Config, environment: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from Slurm's or MPI's variables.

    Does nothing if RANK is set already, as it is by DeepSpeed's launcher, or if the configuration names neither Slurm
    nor MPI. Raises UserError if there are several processes but no address of the first node.
    """
    launcher = config.launcher
    if "RANK" in environment:
        return
    families: tuple[tuple[str, str, str], ...] = ()
    if launcher.deepspeed_slurm or launcher.launcher == "slurm":
        families += _SLURM_VARIABLES
    if launcher.deepspeed_mpi or launcher.launcher in ("openmpi", "mvapich", "mpich", "impi"):
        families += _MPI_VARIABLES
    for names in families:
        if not all(name in environment for name in names):
            continue
        rank, local_rank, world_size = (environment[name] for name in names)
        address = launcher.master_addr or environment.get("MASTER_ADDR")
        if address is None:
            if int(world_size) > 1:
                raise UserError(f"{world_size} processes, but the address of the first is unknown; set master_addr")
            address = "127.0.0.1"
        environment.update(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=world_size, MASTER_ADDR=address)
        environment["MASTER_PORT"] = str(launcher.master_port or environment.get("MASTER_PORT", DEFAULT_PORT))
        return
