#!/usr/bin/env python
"""Write needle-in-a-haystack and variable-tracking tasks of given lengths for evaluate.py --eval-tasks.

python tools/datasets/ruler_tasks.py --checkpoint DIR --lengths 1024 2048 --output my_tasks
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.ruler_tasks import main
from megatron.config.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
