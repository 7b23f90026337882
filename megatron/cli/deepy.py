"""deepy.py: starts a script on every GPU. Input that train.py would reject is reported before any rank is started."""

from collections.abc import Sequence
from pathlib import Path

from megatron.cli.train import add_options
from megatron.config import Config, UserError
from megatron.data.indexed_dataset import is_remote
from megatron.data.splits import config_blends
from megatron.launcher import main as launcher
from megatron.launcher.script_arguments import make_parser

TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def main(words: Sequence[str]) -> int:
    """Run deepy.py with these command-line arguments; returns the exit status of the script. Raises UserError."""
    return launcher.main(words, check_script)


def check_script(script: Path, config: Config, options: Sequence[str]) -> list[str]:
    """Check the options of train.py, the data keys and the backend. Returns the prefixes of the local datasets.

    Other scripts check their own command lines. Raises UserError, or prints the usage and exits with status 2.
    """
    if script.resolve() != TRAIN:
        return []
    files = make_parser("Train a model.", add_options, prog=TRAIN.name).parse_intermixed_args(options).files
    if files:
        raise UserError(f"{files[0]}: configuration files come before the options of {TRAIN.name}")
    backend = config.parallel.distributed_backend
    if backend not in (None, "nccl"):  # without a GPU, gloo replaces nccl
        from megatron.training.distributed import check_backend

        check_backend(backend)
    prefixes = [config.data.data_path or ""]
    if (blends := config_blends(config)) is not None:
        prefixes = [prefix for blend in blends if blend is not None for prefix in blend.prefixes]
    return [prefix for prefix in dict.fromkeys(prefixes) if not is_remote(prefix)]
