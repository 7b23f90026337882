"""Reading metrics.jsonl."""

import math

import pytest
from pydantic import TypeAdapter

from megatron.reporting.training_log import METRICS_LINE, metrics_lines, parse_metrics
from megatron.utils.errors import UserError
from megatron.utils.files import METRICS

LOSS = b'{"iteration": 4, "train/loss": NaN}\n'


def test_incomplete_lines_are_skipped(tmp_path):
    path = tmp_path / METRICS
    path.write_bytes(b'{"iteration": 2}\n{"itera{"iteration": 3}\n' + LOSS + LOSS[:-3])
    assert list(metrics_lines(path, METRICS_LINE)) == [
        (f"{path}, line 1", {"iteration": 2}),
        (f"{path}, line 3", {"iteration": 4}),
    ]


def test_the_adapter_selects_and_checks_values():
    all_values = parse_metrics(LOSS, TypeAdapter(dict[str, float]), "here")
    assert math.isnan(all_values.pop("train/loss"))
    assert all_values == {"iteration": 4}
    with pytest.raises(UserError, match="here: iteration must be an integer, not '4'"):
        parse_metrics(b'{"iteration": "4"}', METRICS_LINE, "here")
