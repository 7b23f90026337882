import io

import pytest
from rich.console import Console

from megatron.utils import progress
from megatron.utils.progress import Progress, readable_time


@pytest.fixture
def clock(monkeypatch):
    """A list whose last value is the current time."""
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[-1])
    return times


def test_lines_in_a_log(capsys, clock):
    with Progress("shards", 1000, unit="MB") as display:
        clock.append(4.0)  # too early for a line
        display.update(100, "10 documents", amount=2.0)
        clock.append(20.0)
        display.update(400, "20 documents", amount=8.0)
        clock.append(21.0)  # one second after the last line
        display.update(500, "30 documents", amount=9.0)
        clock.append(40.0)
        display.update(800, "45 documents", amount=6000.0)
    assert capsys.readouterr().err.splitlines() == [
        "shards: 40%, 20 documents, 0.4 MB/s, 30s left",
        "shards: 80%, 45 documents, 150 MB/s, 10s left",
    ]


def test_resumed_work_counts_from_there(clock):
    display = Progress("shards", 1000, unit="MB")
    clock.append(100.0)
    display.restart(completed=500, amount=50.0)
    assert display.seconds_left is None
    clock.append(110.0)
    display.update(600, amount=60.0)
    assert display.rate == pytest.approx(1.0)
    assert display.seconds_left == pytest.approx(40.0)
    display.restart_rate(60.0)
    clock.append(111.0)
    display.update(600, amount=65.0)
    assert display.rate_text == "5.0 MB/s"


def test_bar_on_a_terminal(clock):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=150)
    with Progress("shards", 100, unit="tokens", console=console) as display:
        clock.append(1.0)
        display.update(50, "3 of 6 [runs]", amount=1234)
        display.print("a [line] above the bar")
        display.update(100, "done")
    assert "50%, 3 of 6 [runs], 1,234 tokens/s, 1s left" in stream.getvalue()
    assert "a [line] above the bar" in stream.getvalue()
    assert "100%, done" in stream.getvalue()


def test_disabled(capsys, clock):
    with Progress("shards", 100, enabled=False) as display:
        clock.append(100.0)
        display.update(50)
        display.print("a line")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "7s"), (75, "1m15s"), (7260, "2h01m")])
def test_readable_time(seconds, text):
    assert readable_time(seconds) == text
