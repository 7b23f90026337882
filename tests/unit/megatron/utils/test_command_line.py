import argparse
import os
import sys
from pathlib import Path

import pytest

from megatron.config.yaml_files import parse_override
from megatron.utils import command_line
from megatron.utils.command_line import OptionParser, extract_overrides, integer, run_main
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(exit_on_error=False)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--query-chunk", type=int)
    parser.add_argument_group("more").add_argument("--own-word", nargs="+")
    return parser


@pytest.mark.parametrize(
    "words",
    [
        ["--query-chunk", "3", "--own_word", "a_b", "c"],
        ["--query_chunk", "3", "--own-word", "a_b", "c"],
        ["--query_chunk=3", "--own-word", "a_b", "c"],
    ],
)
@pytest.mark.parametrize("method", ["parse_args", "parse_intermixed_args"])
def test_dashes_and_underscores_are_the_same(parser, words, method):
    options = getattr(parser, method)(words)
    assert (options.query_chunk, options.own_word, options.files) == (3, ["a_b", "c"], [])


def test_integers_with_commas():
    with pytest.raises(argparse.ArgumentTypeError, match="'128,512'"):
        integer(1, 1000)("128,512")
    with pytest.raises(argparse.ArgumentTypeError, match=r"not '2000'$"):
        integer(1, 1000)("2000")


def test_values_are_unchanged(parser):
    options, unknown = parser.parse_known_args(["a_b.yml", "--query_chunks"])
    assert (options.files, unknown) == (["a_b.yml"], ["--query-chunks"])
    assert parser.parse_args(["--", "--own-word"]).files == ["--own-word"]
    assert parser.parse_args(["--own-word=--query_chunk"]).own_word == ["--query_chunk"]
    with pytest.raises(argparse.ArgumentError, match="--query-chunk"):
        parser.parse_args(["--query_chunk=a"])


def test_subcommands():
    parser = OptionParser()
    parser.add_subparsers().add_parser("to-hf").add_argument("--vocab-file")
    assert parser.parse_args(["to-hf", "--vocab_file", "x_y"]).vocab_file == "x_y"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set"], "is the last word"),
        (["--set", "-d", "x"], "'-d'"),
        (["--set", "a.yml"], r"'a\.yml'"),
        (["--wandb-group", "--fallback"], "'--fallback'.*--wandb-group=--fallback"),
    ],
)
def test_options_that_set_keys_require_values(words, message):
    assert_rejected(message, extract_overrides, words)


def test_extract_overrides():
    words = [
        "a",
        "--set",
        "x=1",
        "y=2",
        "b",
        "--lengths",
        "3",
        "--set",
        "z=-1",
        "--more",
        "--set=u=a=b",
        "v=4",
    ]
    overrides = ["x=1", "y=2", "z=-1", "u=a=b", "v=4"]
    assert extract_overrides(words) == (overrides, ["a", "b", "--lengths", "3", "--more"])


def test_key_options_of_gpt_neox():
    words = [
        "a",
        "--wandb_group",
        "5",
        "--set",
        "x=1",
        "-H=-file",
        "--wandb-team=b=c",
        "--iteration",
        "3",
    ]
    overrides, rest = extract_overrides([*words, "-Hhosts", "--wandb-run-name", "run 🚀"])
    assert overrides[:4] == ['wandb_group="5"', "x=1", 'hostfile="-file"', 'wandb_team="b=c"']
    assert rest == ["a", "--iteration", "3"]
    assert [parse_override(text)[1] for text in overrides] == [
        "5",
        1,
        "-file",
        "b=c",
        "hosts",
        "run 🚀",
    ]


def test_errors_of_ranks_name_the_rank(no_rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run_main(raising(UserError("what is wrong"))) == 2
    assert capsys.readouterr().err == "error on rank 3: what is wrong\n"
    error = UserError("what is wrong")
    error.printed_by_other_rank = True
    assert run_main(raising(error)) == 2
    assert capsys.readouterr().err == ""


def test_status_of_main():
    assert (run_main(lambda: None), run_main(lambda: 3)) == (0, 3)


@pytest.fixture
def no_rank(monkeypatch, tmp_path):
    """Run outside of a launcher, in an empty folder."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "a.yml", "--set", "wandb_api_key=abc123def"])


def raising(error: BaseException):
    def fail():
        raise error

    return fail


def test_lost_connections_to_other_ranks_are_one_line_and_status_3(no_rank, capsys, monkeypatch):
    fail = raising(
        RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:37545. This is typical.")
    )
    monkeypatch.setenv("RANK", "0")
    assert run_main(fail) == 3
    assert (
        "another rank has ended; its messages say why ([pair.cc:553] Connection"
        in capsys.readouterr().err
    )
    monkeypatch.delenv("RANK")
    assert run_main(fail) == 70  # not a rank: the traceback is useful


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            UserError("the server says: 0123456789 is unknown, my_token=abc"),
            2,
            "*** is unknown, my_token=***\n",
        ),
        (UserError("tensor \x1b[31mred\udc80"), 2, "error: tensor \\x1b[31mred\\udc80\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("3 are saved"), 130, "interrupted; 3 are saved\n"),
    ],
)
def test_errors_and_interrupts_are_one_line(no_rank, capsys, monkeypatch, error, status, line):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    assert run_main(raising(error)) == status
    printed = capsys.readouterr().err
    assert printed.endswith(line)
    assert printed.count("\n") == 1


def test_unknown_options_with_control_characters(capsys):
    with pytest.raises(SystemExit):
        OptionParser().parse_args(["--\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


def test_names_that_are_not_utf8(capfdbinary):
    assert run_main(lambda: print("\udcff.jsonl")) == 0
    assert capfdbinary.readouterr().out == b"\\udcff.jsonl\n"


class Panic(BaseException):
    """Like PanicException of pyo3, which is not derived from Exception."""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError"),
        (Panic("called `unwrap()`"), "Panic: called `unwrap()`"),
        (MemoryError(), "out of memory (MemoryError)"),
        (
            BrokenPipeError(32, "Broken pipe"),
            "BrokenPipeError: [Errno 32] Broken pipe",
        ),  # of a worker, not of stdout
        (ValueError("password=hunter2"), "ValueError: password=***"),
    ],
)
def test_unexpected_errors_are_one_line_a_log_and_status_70(no_rank, capsys, error, text):
    assert run_main(raising(error)) == 70
    (log,) = Path().glob("error-*.log")
    line = capsys.readouterr().err
    assert line.startswith(f"error: train.py failed: {text}")
    assert line.endswith(f"; traceback: {log}\n")
    assert line.count("\n") == 1
    report = log.read_text()
    assert "in fail\n    raise error" in report
    assert "command: train.py a.yml --set wandb_api_key=***" in report
    assert "abc123def" not in report
    assert "hunter2" not in report
    assert log.stat().st_mode & 0o777 == 0o600


def test_the_traceback_is_printed_if_no_log_can_be_written(no_rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(command_line, "_write_error_log", lambda report: None)
    assert run_main(raising(KeyError("x"))) == 70
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "error on rank 2: train.py failed: KeyError: 'x'"
    assert "Traceback (most recent call last):" in lines


def test_a_reader_that_stops_early_is_no_error(no_rank, capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run_main(lambda: print("text")) == 141  # fails at the last flush
        print("more")  # the interpreter flushes stdout at exit
    assert capfd.readouterr().err == ""


def test_paths_of_options_are_expanded(monkeypatch, tmp_path, capsys):
    """`--output=~/x` reaches the program with its tilde, because shells expand it only at the start
    of a word.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NOWHERE", raising=False)
    parser = OptionParser()
    parser.add_argument("--output", type=Path)
    parser.add_subparsers().add_parser("sub").add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args(["--output=~/x", "sub", "~/a", "b~"])
    assert (options.output, options.folders) == (tmp_path / "x", [tmp_path / "a", Path("b~")])
    with pytest.raises(SystemExit):
        parser.parse_args(["--output=$NOWHERE/x"])
    assert "NOWHERE" in capsys.readouterr().err
