"""Options and error handling of the dataset tools."""

import pytest

from megatron.cli.dataset_options import INTERRUPTED, run_tool, split_words
from megatron.utils.errors import UserError


def test_split_words():
    assert split_words(["a,b", "c", ",d,"]) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("bad input"), 2, "error: bad input\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
        (KeyboardInterrupt("3 documents are saved"), INTERRUPTED, "interrupted; 3 documents are saved\n"),
    ],
)
def test_run_tool(error, status, message, capsys):
    def fail():
        raise error

    assert run_tool(fail) == status
    assert capsys.readouterr().err == message


def test_names_that_are_not_utf8(capfdbinary):
    assert run_tool(lambda: print("\udcff.jsonl")) == 0
    assert capfdbinary.readouterr().out == b"\\udcff.jsonl\n"
