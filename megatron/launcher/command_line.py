"""The command line of deepy.py: which script, which configuration, and what is passed through."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config.command_line import take_overrides
from megatron.utils.errors import UserError

USAGE = """usage: python deepy.py SCRIPT.py [-d DIR] a.yml b.yml ... [--set key=value ...] [the script's own options]

Start SCRIPT on every GPU (without one: on the CPU) with DeepSpeed's launcher.

  SCRIPT.py            train.py, evaluate.py, generate.py, or a script of your own that uses megatron.config.arguments
  -d, --conf-dir DIR   folder of the configuration files
  a.yml b.yml ...      configuration files, merged; .yml may be left out; no key may stand in two of them
  --set key=value ...  override keys; nested ones with dots (optimizer.params.lr=1e-3); may be repeated
  further options      from the first other option on, all words go to the script (python SCRIPT.py --help lists them)

Keys: configs/neox_arguments.md. Processes: num_gpus, hostfile, launcher and the other keys of the group Launcher."""


@dataclass(frozen=True)
class Request:
    """What the user asked deepy.py to start."""

    script: Path
    files: list[str]
    config_dir: str | None
    overrides: list[str]
    script_options: list[str]


def parse_command_line(words: Sequence[str]) -> Request | None:
    """The request on a command line (without the program's name), or None if it asks for help.

    Raises UserError if the script, or any configuration file, is missing.
    """
    if not words or words[0] in ("-h", "--help"):
        return None
    script, *words = words
    overrides, words = take_overrides(words)
    files: list[str] = []
    config_dir = None
    while words:
        word = words.pop(0)
        if word in ("-d", "--conf-dir", "--conf_dir"):
            if not words:
                raise UserError(f"{word} is the last word; it takes the folder of the configuration files")
            config_dir = words.pop(0)
        elif word.startswith("-"):
            words.insert(0, word)
            break
        else:
            files.append(word)
    path = _find_script(script)
    if not files:
        raise UserError(f"no configuration files were given for {script}; they come before the script's own options")
    return Request(path, files, config_dir, overrides, words)


def _find_script(name: str) -> Path:
    """The script in the working directory, or beside deepy.py."""
    for folder in (Path(), Path(__file__).resolve().parents[2]):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{name}: no such script; deepy.py's first word is the script to start, such as train.py")
