"""Reading metrics.jsonl."""

import pytest

from megatron.reporting.training_log import metrics_lines, parse_metrics
from megatron.utils.errors import UserError
from megatron.utils.files import METRICS

LOSS = b'{"iteration": 4, "train/loss": NaN}\n'


def test_incomplete_lines_are_skipped(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(b'{"iteration": 2}\n{"itera{"iteration": 3}\n' + LOSS + LOSS[:-3])
    assert list(metrics_lines(path)) == [{"iteration": 2}, {"iteration": 4}]


def test_values_of_a_wrong_type():
    with pytest.raises(UserError, match="here: iteration must be an integer, not '4'"):
        parse_metrics(b'{"iteration": "4"}', "here")
