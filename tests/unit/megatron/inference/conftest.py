"""Settings of all tests in this folder."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small do not gain from threads, and lose much if other processes are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
