"""Evaluate checkpoints on long sequences:
`python deepy.py evaluate.py a.yml b.yml ... --lengths 512 1024 2048 ...`
"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.evaluate import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
