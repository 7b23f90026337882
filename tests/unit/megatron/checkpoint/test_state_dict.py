"""State of a run: progress, random states, and the checks of a damaged file."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.state_dict import (
    COUNTERS,
    TrainingState,
    capture_random_state,
    check_run_state,
    restore_random_state,
)
from megatron.checkpoint.storage import CheckpointError, load_tensors

RUN_STATE = {
    "training": {},
    "shape": {},
    "global_batch": 8,
    "optimizer_left_out": False,
    "counters": dict.fromkeys(COUNTERS, 0),
    "loss_scaler": {},
}


def draw():
    return random.random(), np.random.random(), torch.rand(3).tolist()  # noqa: NPY002


def test_random_states_continue_after_a_file(tmp_path):
    random.gauss(0, 1)  # the generator keeps the second number of the pair for the next call
    torch.save(capture_random_state(), tmp_path / "random.pt")
    expected = draw()
    assert draw() != expected
    restore_random_state(load_tensors(tmp_path / "random.pt"), tmp_path / "random.pt")
    assert draw() == expected


@pytest.mark.parametrize(
    "change", [{"torch": torch.zeros(3, dtype=torch.uint8)}, {"python": 1}, {"numpy": ("MT19937",)}]
)
def test_other_data_is_not_a_random_state(change):
    with pytest.raises(CheckpointError, match=r"random\.pt"):
        restore_random_state({**capture_random_state(), **change}, Path("random.pt"))


def test_progress_ignores_unknown_fields():
    assert TrainingState.from_dict({"iteration": 3, "later": 1}) == TrainingState(iteration=3)


def test_run_state_is_checked():
    check_run_state(RUN_STATE, Path("a.pt"))
    for name in RUN_STATE:
        with pytest.raises(CheckpointError, match=rf"a\.pt: {name}: Input should be"):
            check_run_state({**RUN_STATE, name: None}, Path("a.pt"))
    with pytest.raises(CheckpointError, match=r"counters\.skipped_steps"):
        check_run_state({**RUN_STATE, "counters": {"global_steps": 1, "global_samples": 1}}, Path("a.pt"))
