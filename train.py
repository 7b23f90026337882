"""Train a model: `python deepy.py train.py a.yml b.yml ...`, or `python train.py ...` for a single
process.
"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.train import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
