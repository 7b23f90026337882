"""Generate text from a checkpoint:
`python deepy.py generate.py a.yml b.yml ... [-i prompts.txt] [-o samples.jsonl]`
"""

import sys

import check_megatron  # noqa: F401
from megatron.cli.generate import main
from megatron.utils.command_line import run_main

if __name__ == "__main__":
    sys.exit(run_main(main))
