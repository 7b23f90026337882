"""Prepare a dataset by name: python prepare_data.py [-d DIR] [-t TOKENIZER] [--from
PATH] DATASET
"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.prepare_data import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
