import pytest

from megatron.utils.errors import first_line


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
