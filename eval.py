"""evaluate.py under GPT-NeoX's name:
`python deepy.py eval.py a.yml b.yml ... --eval_tasks TASK ...`
"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.evaluate import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
