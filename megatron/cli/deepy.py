"""deepy.py and `kerple train`: start a script on every GPU, after they have checked what train.py
would reject.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import train as train_script
from megatron.config import Config, UserError
from megatron.data.splits import dataset_prefixes
from megatron.launcher import main as launcher
from megatron.launcher.script_arguments import (
    MERGED_CONFIG_OPTION,
    make_parser,
    reject_config_options,
)
from megatron.utils.command_line import OptionParser

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"
# What the ranks of `kerple train` run: an installation has no scripts.
TRAIN_COMMAND = [str(ROOT / "kerple_command.py"), "train"]


def main(argv: Sequence[str]) -> int:
    """Run deepy.py with these arguments; returns the exit status. Raises UserError."""
    return launcher.main(argv, check_script, try_script=try_script)


def train() -> int:
    """`kerple train`: deepy.py with train.py. Other launchers, such as torchrun, start it as the
    ranks themselves.
    """
    argv = sys.argv[1:]
    if {"-h", "--help"} & set(argv):
        _train_parser("kerple train").print_help()
        return 0
    if MERGED_CONFIG_OPTION in argv or "RANK" in os.environ:
        return train_script.main()
    return launcher.main(argv, check_script, TRAIN_COMMAND, train_script.main, try_script)


def _train_parser(name: str) -> OptionParser:
    """The command line of training as deepy.py and `kerple train` accept it."""
    parser = make_parser("Train a model with the given configuration files.", prog=name)
    parser.add_argument(
        launcher.DRY_RUN_OPTION,
        action="store_true",
        help="check what can be checked without ssh, print what would be started on each host, "
        "and exit",
    )
    return parser


def try_script(program: Sequence[str], config: Config) -> None:
    """One step of the model that train.py would train. Raises UserError if it fails."""
    if list(program) == TRAIN_COMMAND or Path(program[0]).resolve() == TRAIN:
        from megatron.training.startup import try_model  # imports DeepSpeed

        try_model(config, "--dry-run")


def check_script(
    program: Sequence[str], config: Config, options: Sequence[str], world_size: int
) -> list[str]:
    """Check the options of train.py, train_iters, the parallel sizes and batch sizes for this
    number of processes, and the data keys. Returns the prefixes of the local datasets.

    Other scripts check their own command lines. Raises UserError, or prints the usage and exits
    with status 2.
    """
    is_command = list(program) == TRAIN_COMMAND
    if not is_command and Path(program[0]).resolve() != TRAIN:
        return []
    name = "kerple train" if is_command else TRAIN.name
    parsed = _train_parser(name).parse_intermixed_args(options)
    if parsed.files:
        raise UserError(f"{parsed.files[0]}: configuration files come before the options of {name}")
    reject_config_options(parsed)
    config.schedule.last_iteration  # noqa: B018 (raises UserError if it is not set)
    config.batch.resolve(config.parallel.data_parallel_size(world_size))
    return dataset_prefixes(config)
