"""train.py's command line."""

import warnings
from collections.abc import Sequence

from megatron.launcher.script_arguments import parse_arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the configuration files say; returns the exit status."""
    config, _ = parse_arguments("Train a model as the configuration files say.", argv)
    # megatron-core warns on import of what it would like to have installed; none of it is used here.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    from megatron.training.loop import train

    train(config)
    return 0
