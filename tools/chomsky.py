#!/usr/bin/env python
"""The Chomsky-hierarchy benchmark: which tasks small transformers learn at lengths up to 40 and still solve at 500.

python tools/chomsky.py [--tasks ...] [--methods ...] [--seeds ...] [--output runs/chomsky]

Runs that are done are not done again, and one that was interrupted goes on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_megatron  # noqa: F401
from megatron.cli.chomsky import main
from megatron.config.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
