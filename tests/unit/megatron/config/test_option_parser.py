"""Dashes and underscores in the names of options: the same, in every script."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

from megatron.config.option_parser import OptionParser, option_name
from megatron.launcher.command_line import parse_command_line

ROOT = Path(__file__).parents[4]
SCRIPTS = ["train.py", "evaluate.py", "generate.py", "prepare_data.py"]
SCRIPTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").rglob("*.py"))


@pytest.fixture
def parser() -> OptionParser:
    made = OptionParser(exit_on_error=False)
    made.add_argument("files", nargs="*")
    made.add_argument("--query-chunk", type=int)
    made.add_argument_group("more").add_argument("--own_word", nargs="+")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["--query-chunk", "3", "--own_word", "a_b", "c"],
        ["--query_chunk", "3", "--own-word", "a_b", "c"],
        ["--query_chunk=3", "--own-word", "a_b", "c"],
    ],
)
@pytest.mark.parametrize("method", ["parse_args", "parse_intermixed_args"])
def test_both_spellings(parser, words, method):
    found = getattr(parser, method)(words)
    assert (found.query_chunk, found.own_word, found.files) == (3, ["a_b", "c"], [])


def test_values_and_what_is_not_known_stay_as_they_are(parser):
    found, unknown = parser.parse_known_args(["a_b.yml", "--query_chunks"])
    assert (found.files, unknown) == (["a_b.yml"], ["--query_chunks"])
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


def test_the_name_of_a_stored_value():
    assert option_name("query_chunk") == "--query-chunk"


def test_deepys_own_option():
    for name in ("-d", "--conf-dir", "--conf_dir"):
        assert parse_command_line(["train.py", name, "configs", "demo.yml"]).config_dir == "configs"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_shows_dashes_and_takes_underscores(script, monkeypatch, capsys):
    made = []
    construct = argparse.ArgumentParser.__init__

    def noting(parser, *arguments, **more):
        construct(parser, *arguments, **more)
        made.append(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", noting)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
    assert made
    assert all(isinstance(parser, OptionParser) for parser in made)
    names = {name for parser in made for action in parser._actions for name in action.option_strings}
    assert not [name for name in names if "_" in name]
