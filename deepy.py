#!/usr/bin/env python
"""Start a script on every GPU of one or more machines, or on the CPU: `python deepy.py --help`"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.deepy import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
