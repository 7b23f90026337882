"""Profiling of training steps."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron.config import Config, UserError
from megatron.training.loop import train
from megatron.training.profiler import profiled_steps
from tests.support.runs import training_settings


def test_a_profiled_run(tmp_path, data_path):
    """Iterations 3 and 4 of 6: forward and backward, in a trace, a table and the log."""
    keys = {"profile": True, "profile_step_start": 2, "profile_step_stop": 4}
    train(Config.from_flat(training_settings(tmp_path, data_path, eval_iters=0, save_interval=None, **keys)))
    (trace,) = (tmp_path / "logs").glob("rank_0.*.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert sorted(name for name in set(names) if name.startswith("ProfilerStep")) == [
        "ProfilerStep#2",
        "ProfilerStep#3",
    ]
    assert "GeluBackward0" in names
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert "Self CPU" in (tmp_path / "logs" / "rank_0.operators.txt").read_text()
    log = (tmp_path / "logs" / "train.log").read_text()
    assert "profile: iterations 3 to 4; traces" in log
    assert "aten::" in log


def recorded(tmp_path, iteration, total, device="cpu"):
    """The lines, and the steps in the trace, of a run from `iteration` to `total`; steps 3 and 4 are to be profiled."""
    logging = SimpleNamespace(
        profile=True, profile_step_start=3, profile_step_stop=5, tensorboard_dir=str(tmp_path), log_dir=None
    )
    layout = SimpleNamespace(rank=1, device=SimpleNamespace(type=device))
    lines = []
    with profiled_steps(SimpleNamespace(logging=logging), layout, iteration, lines.append) as step:
        for index in range(iteration, total):
            with torch.profiler.record_function(f"step {index}"):
                torch.ones(2).sum()
            step()
    traces = list(tmp_path.glob("rank_1.*.json"))
    events = json.loads(traces[0].read_text())["traceEvents"] if traces else []
    return lines, sorted({event["name"] for event in events if event["name"].startswith("step ")})


@pytest.mark.parametrize(
    ("iteration", "total", "steps", "line"),
    [
        (0, 7, ["step 3", "step 4"], "profile: iterations 4 to 5;"),
        (2, 7, ["step 3", "step 4"], "profile: iterations 4 to 5;"),
        (4, 7, ["step 4"], "profile: iterations 5 to 5;"),  # resumed
        (5, 7, [], "profile: no step is profiled, because training resumes after profile_step_stop 5"),
        (0, 4, ["step 3"], "profile: iterations 4 to 4;"),  # stopped by a signal
    ],
)
def test_steps_are_counted_from_iteration_0(tmp_path, iteration, total, steps, line):
    lines, profiled = recorded(tmp_path, iteration, total)
    assert profiled == steps
    assert lines[0].startswith(line)


def test_the_steps_are_marked_for_nsys_on_a_gpu(tmp_path, monkeypatch):
    marks = []
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: marks.append(name))
    lines, _ = recorded(tmp_path, 0, 7, device="cuda")
    assert marks == ["start", "stop"]
    assert lines


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"profile_step_start": 4, "profile_step_stop": 4}, "profile_step_stop 4.*profile_step_start"),
        ({}, "profile_step_start 10.*train_iters.*6"),
        ({"profile_step_start": 1, "log_dir": None}, "neither is set; set one of them"),
    ],
)
def test_contradictions(tmp_path, keys, message):
    with pytest.raises(UserError, match=message):
        Config.from_flat(training_settings(tmp_path, "nowhere", profile=True, **keys))
