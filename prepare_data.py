"""Prepare a dataset by name: python prepare_data.py [-d DIR] [-t TOKENIZER] [--from PATH] DATASET"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import run_tool
from megatron.cli.prepare_data import main

if __name__ == "__main__":
    sys.exit(run_tool(main))
