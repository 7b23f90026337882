"""Train a model: python deepy.py train.py a.yml b.yml ..., or python train.py ... for one process."""

import sys

from megatron.cli.train import main
from megatron.config.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
