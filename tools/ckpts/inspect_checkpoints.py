"""GPT-NeoX's name for `kerple inspect`: python tools/ckpts/inspect_checkpoints.py DIR"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.inspect import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
