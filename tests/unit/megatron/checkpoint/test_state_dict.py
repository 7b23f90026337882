"""Random states of a run."""

import random

import numpy as np
import torch

from megatron.checkpoint.state_dict import capture_random_state, restore_random_state
from megatron.checkpoint.storage import load_tensors


def draw():
    return random.random(), np.random.random(), torch.rand(3).tolist()  # noqa: NPY002


def test_random_states_continue_after_a_file(tmp_path):
    random.gauss(0, 1)  # the generator keeps the second number of the pair for the next call
    torch.save(capture_random_state(), tmp_path / "random.pt")
    expected = draw()
    assert draw() != expected
    restore_random_state(load_tensors(tmp_path / "random.pt"))
    assert draw() == expected
