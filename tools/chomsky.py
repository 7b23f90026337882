#!/usr/bin/env python
"""The Chomsky-hierarchy benchmark: which tasks a small transformer solves beyond its training length, by method.

python tools/chomsky.py [--tasks ...] [--methods ...] [--seeds ...] [--output runs/chomsky]

Finished experiments are skipped, and an interrupted one resumes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_megatron  # noqa: F401
from megatron.cli.chomsky import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
