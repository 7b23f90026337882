"""Settings of all tests.

- One thread, as in the processes that tests start: the order of sums depends on the number of
  threads.
- Without a GPU, Triton interprets its kernels. Triton reads this setting when kernels are defined.
- A fork does not collect garbage of its parent, such as process groups: it does not have the
  threads that their destructors wait for, and would hang or abort.
- transformers copies the code of models into a cache of the user. Each test process gets its own.
- Operators that a test replaced for processors without fast bf16 products are torch's own in the
  next test.
- SIGINT raises KeyboardInterrupt, even if a shell started the tests in the background with SIGINT
  ignored.
- Directories with slow tests run first, so that parallel workers finish at about the same time.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from collections import Counter

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available() and "SIMULATED_CUDA" not in os.environ:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="transformers_modules_")
atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
os.register_at_fork(after_in_child=gc.freeze)
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def fork_server():
    """Runs scripts as forks of a process that has imported their modules."""
    from tests.support.fork_server import ForkServer

    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def data_path(tmp_path_factory):
    """The prefix of a small dataset."""
    from tests.support.checkpoints import write_corpus

    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)


LONG = (
    "integration/",
    "unit/megatron/training/",
    "unit/megatron/checkpoint/",
    "unit/kerple/",
    "unit/megatron/model/",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # The cases of a test after the first n of its mark `quick(n)` are marked `ci`.
    cases: Counter[str] = Counter()
    for item in items:
        marker, name = item.get_closest_marker("quick"), item.nodeid.partition("[")[0]
        cases[name] += 1
        if marker is not None and cases[name] > marker.args[0]:
            item.add_marker("ci")

    def place(item) -> int:
        return next(
            (index for index, start in enumerate(LONG) if item.nodeid.startswith(f"tests/{start}")),
            len(LONG),
        )

    items.sort(key=place)
