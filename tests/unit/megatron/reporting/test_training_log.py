"""Reading metrics.jsonl."""

from megatron.reporting.training_log import parse_metrics, read_log
from megatron.utils.files import METRICS
from tests.support.errors import assert_rejected

STEP = b'{"iteration": 4, "train/loss": NaN, "train/tokens": 8, "train/tokens_per_second": 4}\n'


def test_incomplete_lines_are_skipped(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(b'{"iteration": 2}\n{"itera{"iteration": 3}\n' + STEP + STEP[:-3])
    assert read_log(path) == (0.5, 4.0)


def test_values_of_a_wrong_type():
    assert_rejected("here: iteration must be an integer, not '4'", parse_metrics, b'{"iteration": "4"}', "here")
