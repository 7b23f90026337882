#!/usr/bin/env python
"""What a checkpoint is: step, sizes, shards, number formats, kernels per head, and whether its files are whole.

python tools/ckpts/inspect.py DIR [OTHER] [--iteration N] [--json]

DIR holds `latest` and global_stepN, in this project's or the release's layout; a global_stepN itself will do. With
OTHER, the differences of the two. Exit status: 0; 1 if a file is not as the manifest says; 2 if it cannot be read.
"""

import os
import sys

# This file has the name of a module of the standard library, and Python looks for modules in the folder of the script
# that it runs: this one, or a neighbour of it. So the folder is taken out, and who asked for the module is given it.
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [os.path.dirname(os.path.dirname(HERE)), *(path for path in sys.path if os.path.abspath(path) != HERE)]

if __name__ == "__main__":
    from megatron.checkpoint.inspection import main
    from megatron.config.arguments import run_main

    sys.exit(run_main(main))
elif __name__ == "inspect":
    del sys.modules["inspect"]
    import inspect  # noqa: F401 (the standard library's, in this one's place)
