"""docs/evaluation.md: its example runs, and it knows every protocol."""

import contextlib
import io
import re
from pathlib import Path

from megatron.evaluation import PROTOCOLS
from megatron.evaluation.records import KINDS

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "evaluation.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "docs/evaluation.md", "exec"), {})
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert [line[:3] for line in lines] == [
        ["non-overlapping", "64", "1024"],
        ["non-overlapping", "256", "1024"],
        ["last-k@32", "64", "128"],
        ["last-k@32", "256", "128"],
    ]
    assert all(100 < float(line[3]) < 600 and float(line[4]) > 0 for line in lines)  # about 256, untrained


def test_every_protocol_and_kind_is_described():
    for name in (*PROTOCOLS, *KINDS):
        assert f"`{name}`" in TEXT
