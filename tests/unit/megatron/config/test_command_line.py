import argparse

import pytest

from megatron.config.command_line import OptionParser, extract_overrides, option_name, run_main
from megatron.config.yaml_files import parse_override
from megatron.utils.errors import UserError


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(exit_on_error=False)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--query-chunk", type=int)
    parser.add_argument_group("more").add_argument("--own_word", nargs="+")
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


def test_values_and_unknown_options_are_unchanged(parser):
    options, unknown = parser.parse_known_args(["a_b.yml", "--query_chunks"])
    assert (options.files, unknown) == (["a_b.yml"], ["--query_chunks"])
    assert parser.parse_args(["--", "--own-word"]).files == ["--own-word"]
    assert parser.parse_args(["--own-word=--query_chunk"]).own_word == ["--query_chunk"]
    with pytest.raises(argparse.ArgumentError, match="--query-chunk: invalid int value"):
        parser.parse_args(["--query_chunk=a"])


def test_subcommands():
    parser = OptionParser()
    parser.add_subparsers().add_parser("to-hf").add_argument("--vocab-file")
    assert parser.parse_args(["to-hf", "--vocab_file", "x_y"]).vocab_file == "x_y"


def test_names_are_not_abbreviated(parser):
    assert parser.parse_known_args(["--query", "3"])[1] == ["--query"]


def test_option_name():
    assert option_name("query_chunk") == "--query-chunk"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set"], "is the last word"),
        (["--set", "-d", "x"], "followed by '-d'"),
        (["--set", "a.yml"], "followed by 'a.yml'"),
        (["--wandb_group"], "--wandb_group is the last word; it must be followed by the value of wandb_group"),
    ],
)
def test_options_that_set_keys_require_values(words, message):
    with pytest.raises(UserError, match=message):
        extract_overrides(words)


def test_extract_overrides():
    words = ["a", "--set", "x=1", "y=2", "b", "--lengths", "3", "--set", "z=-1", "--more"]
    assert extract_overrides(words) == (["x=1", "y=2", "z=-1"], ["a", "b", "--lengths", "3", "--more"])


def test_key_options_of_gpt_neox():
    words = ["a", "--wandb_group", "5", "--set", "x=1", "-H", "-file", "--wandb-team=b=c", "--iteration", "3"]
    overrides, rest = extract_overrides(words)
    assert overrides == ['wandb_group="5"', "x=1", 'hostfile="-file"', 'wandb_team="b=c"']
    assert rest == ["a", "--iteration", "3"]
    assert [parse_override(text)[1] for text in overrides] == ["5", 1, "-file", "b=c"]


def test_user_errors_are_one_line_and_status_2(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def fail():
        raise UserError("what is wrong")

    assert run_main(fail) == 2
    assert capsys.readouterr().err == "error: what is wrong\n"
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail) == 2
    assert capsys.readouterr().err == "error on rank 3: what is wrong\n"
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 3) == 3


def test_lost_connections_to_other_ranks_are_one_line_and_status_3(capsys, monkeypatch):
    def fail():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:37545. This is typical.")

    monkeypatch.setenv("RANK", "0")
    assert run_main(fail) == 3
    assert "another rank has ended; its messages say why ([pair.cc:553] Connection" in capsys.readouterr().err
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="Connection closed"):  # not a rank: the traceback is useful
        run_main(fail)
