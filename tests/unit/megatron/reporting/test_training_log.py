"""Reading metrics.jsonl; test_speed.py reads complete and incomplete ones."""

import pytest

from megatron.reporting.training_log import seconds_per_step
from megatron.utils.files import METRICS
from tests.support.errors import assert_rejected

STEP = (
    b'{"iteration": 4, "train/loss": NaN, "train/seconds_per_step": 2, '
    b'"train/tokens_per_second": 4}\n'
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"iteration": "5"}', r"metrics\.jsonl.*2: iteration must be an integer, not '5'"),
        (b'{"iteration": 5, "train/seconds_per_step": Infinity}', "2: train/seconds_per_step"),
    ],
)
def test_values_of_a_wrong_type(line, message, tmp_path):
    (tmp_path / METRICS).write_bytes(STEP + line + b"\n")
    assert_rejected(message, seconds_per_step, tmp_path / METRICS)
