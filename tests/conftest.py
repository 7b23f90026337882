"""One thread, here as in the processes that tests start: sums in another order are not equal bit for bit.

Without a GPU Triton's kernels are interpreted, which Triton must be told before they are defined.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
