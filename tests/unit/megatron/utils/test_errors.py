import pytest

from megatron.utils.errors import first_line, visible


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("wrong\nat byte 3"), "wrong"),
        (ValueError("\n  wrong"), "wrong"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_first_line(error, line):
    assert first_line(error) == line


def test_visible_escapes_what_a_terminal_would_interpret():
    assert visible("größe 1\t2\n") == "größe 1\t2\n"
    assert visible("a\x1b[31mb\r\ud800\u202e") == "a\\x1b[31mb\\r\\ud800\\u202e"
