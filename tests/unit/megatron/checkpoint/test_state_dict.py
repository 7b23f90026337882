"""Random states of a run."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.checkpoint.state_dict import (
    COUNTERS,
    capture_random_state,
    restore_counters,
    restore_random_state,
)
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


@pytest.mark.parametrize(
    ("saved", "dynamic", "loss_scale", "expected"),
    [
        ({"cur_scale": 64.0, "cur_iter": 7}, True, True, 64.0),
        ({"cur_scale": 64.0}, True, True, 1024.0),  # the saved one was constant
        ({"cur_scale": 64.0, "cur_iter": 7}, False, True, 1024.0),
        ({"cur_scale": 64.0, "cur_iter": 7}, True, False, 1024.0),
    ],
)
def test_only_a_dynamic_loss_scale_is_restored_to_a_dynamic_one(
    saved, dynamic, loss_scale, expected
):
    scaler = SimpleNamespace(dynamic=dynamic, cur_scale=1024.0)
    deepspeed = SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
    counters = {name: number for number, name in enumerate(COUNTERS, start=3)}
    state = {"counters": counters, "loss_scaler": saved}
    restore_counters(SimpleNamespace(deepspeed=deepspeed), state, loss_scale=loss_scale)
    assert scaler.cur_scale == expected
    assert {name: getattr(deepspeed, name) for name in COUNTERS} == counters
