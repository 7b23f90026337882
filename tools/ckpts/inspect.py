"""What a checkpoint is: step, sizes, shards, number formats, kernels per head, and whether its files are whole.

python tools/ckpts/inspect.py DIR [OTHER] [--iteration N] [--json]
python tools/ckpts/inspect.py DIR --accept         of a checkpoint that lost its manifest, write a new one

DIR holds `latest` and global_stepN, in this project's or the release's layout; a global_stepN itself will do. With
OTHER, the differences of the two. Exit status: 0; 1 if a file is not as the manifest says; 2 if it cannot be read.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # In place of this script's folder, in which this file has the name of a module of the standard library.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.checkpoint.inspection import main
    from megatron.config.arguments import run_main

    sys.exit(run_main(main))
