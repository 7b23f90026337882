import io

import pytest
from rich.console import Console

from megatron.utils import progress
from megatron.utils.progress import Progress, fitted, readable_time


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


def test_resumed_work_counts_from_there(capsys, clock):
    display = Progress("shards", 1000, unit="MB")
    clock.append(100.0)
    display.restart(completed=500, amount=50.0)
    clock.append(110.0)
    display.update(500, amount=50.0)
    clock.append(120.0)
    display.update(600, amount=70.0)
    assert capsys.readouterr().err.splitlines() == [
        "shards: 50%, 0.0 MB/s",
        "shards: 60%, 1.0 MB/s, 1m20s left",
    ]
    assert display.rate_text == "1.0 MB/s"


def test_a_line_in_a_terminal(clock):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=60)
    with Progress("shards", 100, unit="tokens", console=console) as display:
        clock.append(1.0)
        display.update(50, "3 of 6 [runs]", amount=1234)
        display.print("a [line] above it")
        clock.append(2.0)
        display.update(75, "a status that is far too long for the terminal")
    first, above, last = stream.getvalue().split("\x1b[2K")[1:4]
    assert first == "shards: 50%, 3 of 6 [runs], 1,234 tokens/s, 1s left\r"
    assert above == "a [line] above it\n"
    assert last.startswith("shards: 75%, a status")
    assert len(last) <= 61
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_disabled(capsys, clock):
    with Progress("shards", 100, enabled=False) as display:
        clock.append(100.0)
        display.update(50)
        display.print("a line")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "7s"), (75, "1m15s"), (7260, "2h01m")])
def test_readable_time(seconds, text):
    assert readable_time(seconds) == text


def test_long_texts_break_between_parts_and_words():
    words = [f"word{number}" for number in range(30)]
    path = "/" + "long" * 25
    text = f"training data: {path} has {' '.join(words)} | lm loss 1.5 | {'x' * 70} | 3 samples/s"
    lines = fitted(text).split("\n")
    assert lines[0] == f"training data: {path}"
    assert max(map(len, lines[1:])) <= 80
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(line.strip() for line in lines).replace(" | ", " ") == text.replace(" | ", " ")
    assert fitted("  kernel: mean 1") == "  kernel: mean 1"
