"""These tests need the simulated CUDA device; `tests/integration/test_gpu.py` starts them in a
process that has it.
"""

from tests.support.simulated_cuda import is_active

collect_ignore_glob = [] if is_active() else ["test_*.py"]
