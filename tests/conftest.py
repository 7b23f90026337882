"""One thread, here as in the processes that tests start: sums in another order are not equal bit for bit.

Without a GPU Triton's kernels are interpreted, which Triton must be told before they are defined. And transformers
copies the code of models that it loads into one folder for all of a user's processes: those that run tests side by side
each get their own. Tests that interrupt a process need one that listens, also where they run in the background of a
shell, which has its jobs ignore Ctrl-C.

Files whose tests start many processes come first, so that no worker is left with one at the end.
"""

import atexit
import os
import shutil
import signal
import tempfile

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available() and "SIMULATED_CUDA" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="transformers_modules_")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("integration/", "unit/megatron/training/", "unit/megatron/checkpoint/", "unit/kerple/", "unit/megatron/model/")


def pytest_collection_modifyitems(items):
    def place(item) -> int:
        return next((index for index, start in enumerate(LONG) if item.nodeid.startswith(f"tests/{start}")), len(LONG))

    items.sort(key=place)
