"""Tables, figures and an HTML report from stored results: python tools/report.py RESULTS... --output DIR"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_megatron  # noqa: F401
from megatron.cli.report import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
