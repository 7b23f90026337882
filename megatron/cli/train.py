"""train.py: train a model."""

import os
import warnings
from collections.abc import Sequence
from unittest.mock import patch

from megatron.launcher.script_arguments import parse_arguments
from megatron.utils.environment import use_gpus


def main(argv: Sequence[str] | None = None) -> int:
    """Train with the configuration files on the command line. Returns the exit status."""
    config, _ = parse_arguments("Train a model with the given configuration files.", argv)
    # On import, megatron-core warns about optional packages that are not used here.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    # On import, DeepSpeed warns if it finds no accelerator and this variable is not set.
    variables = {}
    if not use_gpus():
        variables["DS_ACCELERATOR"] = "cpu"
    with patch.dict(os.environ, variables):
        from megatron.training.loop import train

    train(config)
    return 0
