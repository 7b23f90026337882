"""Training runs of one rank and of two ranks in every parallel layout."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import metrics

VOCABULARY = 512
LAYOUTS: dict[str, dict[str, object]] = {
    "one": {},
    "data": {"num_gpus": 2},
    "zero-1": {"num_gpus": 2, "zero_optimization": {"stage": 1}},
    "zero-2": {"num_gpus": 2, "zero_optimization": {"stage": 2}},
    "zero-3": {"num_gpus": 2, "zero_optimization": {"stage": 3}},
    "pipeline": {"num_gpus": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
    "tensor": {"num_gpus": 2, "model_parallel_size": 2},
}
# trained(folder, layout, **keys) trains in `folder` and returns the output of rank 0.
Trained = Callable[..., str]


def slow(*values: object) -> object:
    """A slow case of a test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_same_metrics(folder: Path, expected: Path, *names: str, after: int = 0) -> None:
    for name in names:
        values = {step: value for step, value in metrics(expected, name).items() if step > after}
        assert values, name
        assert metrics(folder, name) == pytest.approx(values, abs=1e-4), name
