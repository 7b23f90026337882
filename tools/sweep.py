"""Train, evaluate and report the runs of a sweep: python tools/sweep.py SWEEP.yml [--dry-run]"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import check_megatron  # noqa: E402, F401
from megatron.cli.sweep import main  # noqa: E402
from megatron.config.command_line import run_main  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_main(lambda: main(ROOT)))
