"""Show what a checkpoint contains: python tools/ckpts/inspect.py DIR"""

import sys
from pathlib import Path

# Replaces this script's folder, where inspect.py would shadow the standard library's module.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.inspect import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
