"""Plots of all positional methods: python tools/plot_kernels.py [--output FILE] [--checkpoint DIR ...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_megatron  # noqa: F401
from megatron.cli.plot_kernels import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
