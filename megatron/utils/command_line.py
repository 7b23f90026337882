"""Command lines of the entry points and tools: option parser, options that set keys, and
`run_main`, which turns every exception into one line and an exit status.

SCRIPT [-d DIR] a.yml b.yml ... [--set key=value ...] [options of the script]
"""

import argparse
import contextlib
import io
import json
import math
import os
import platform
import re
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.utils.errors import UserError, first_line, shortened, visible
from megatron.utils.files import expanded_path
from megatron.utils.secrets import redact

# The largest integer of options and keys: up to it, a float represents all integers exactly.
MAX_INT = 2**53
SET_OPTION = "--set"
# GPT-NeoX's options that set a key: option -> key.
KEY_OPTIONS = {
    "--hostfile": "hostfile",
    "-H": "hostfile",
    "--wandb-group": "wandb_group",
    "--wandb-team": "wandb_team",
    "--wandb-run-name": "wandb_run_name",
}
EXIT_STATUS_OF_USER_ERROR = 2
EXIT_STATUS_OF_LOST_CONNECTION = 3
EXIT_STATUS_OF_UNEXPECTED_ERROR = 70  # EX_SOFTWARE of <sysexits.h>
# What shells report for a process that SIGINT or SIGPIPE ended: 128 + the signal's number.
EXIT_STATUS_OF_INTERRUPT = 130
EXIT_STATUS_OF_BROKEN_PIPE = 141
# In the messages of gloo and NCCL after another rank has ended.
_LOST_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|remote process exit", re.I
)
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|Unable to allocate", re.I)
_MAX_LINE = 1000  # characters of an exception's text in the line that is printed


class OptionParser(argparse.ArgumentParser):
    """argparse's parser, without abbreviations, in which `--query_chunk` and `--query-chunk` are
    the same option. Values of the type Path are expanded as by `path_option`.

    Help texts and messages show the declared spelling, which has dashes throughout this project.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.register("type", Path, lambda text: Path(path_option(text)))

    def error(self, message: str) -> NoReturn:
        super().error(visible(redact(message)))

    # The base class declares overloads by the type of `namespace`.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if args is None:
            args = sys.argv[1:]
        words = list(args)
        for index, word in enumerate(args):
            if word == "--":  # ends the options
                break
            name, equals, value = word.partition("=")
            words[index] = _with_dashes(name) + equals + value
        return super().parse_known_args(words, namespace)


def docstring_parser(docstring: str | None) -> OptionParser:
    """A parser that prints a module's docstring unchanged."""
    return OptionParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)


def _with_dashes(option: str) -> str:
    if not option.startswith("--"):
        return option
    return option.replace("_", "-")


def integer(lowest: int, highest: int = MAX_INT) -> Callable[[str], int]:
    """The `type` of an option whose value is an integer in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:
            limits = f"from {lowest:,} to {highest:,}"
            if highest == MAX_INT:
                limits = f"of at least {lowest:,}"
            message = f"must be an integer {limits}, not {shortened(text)!r}"
            if re.fullmatch(r"\d+(,\d+)+,?", text):
                message += "; separate several values with spaces"
            raise argparse.ArgumentTypeError(message)
        return value

    return parse


def number(
    lowest: float, highest: float = math.inf, *, above: bool = False
) -> Callable[[str], float]:
    """The `type` of an option with a finite number in this range; `above` excludes `lowest`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (lowest <= value <= highest and math.isfinite(value)) or (above and value == lowest):
            start = "above" if above else "from"
            limits = f"{start} {lowest:g}"
            if highest < math.inf:
                limits += f" to {highest:g}"
            raise argparse.ArgumentTypeError(f"must be a number {limits}, not {shortened(text)!r}")
        return value

    return parse


def path_option(text: str) -> str:
    """The `type` of an option whose value is a path, with `~` and `$NAME` expanded as in keys."""
    try:
        return expanded_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def option_name(attribute: str) -> str:
    """The option whose value argparse stores as `attribute`: query_chunk -> --query-chunk."""
    return "--" + attribute.replace("_", "-")


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `extract_overrides` removes, for the help text."""
    parser.add_argument(
        SET_OPTION, metavar="KEY=VALUE", help="override keys (nested ones with dots); repeatable"
    )
    for key in dict.fromkeys(KEY_OPTIONS.values()):
        names = sorted(name for name in KEY_OPTIONS if KEY_OPTIONS[name] == key)
        parser.add_argument(*names, metavar="VALUE", help=f"same as --set {key}=VALUE")


def extract_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Remove every `--set key=value ...` and every `KEY_OPTIONS` option from a command line.

    Returns (overrides of the form key=value, remaining words). --set ends at the first word that is
    not of the form key=value, so files may follow it. As in argparse, --set=key=value,
    --hostfile=FILE and -HFILE are accepted. Raises UserError if an option is not followed by its
    value.
    """
    overrides: list[str] = []
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if word.startswith("-H") and option != "-H":
            option, equals, value = "-H", "=", word.removeprefix("-H")
        if equals and (option == SET_OPTION or _with_dashes(option) in KEY_OPTIONS):
            queue.insert(0, value)
        problem = "is the last word"
        if queue:
            problem = f"is followed by {queue[0]!r}"

        # An option for a key, with one value.
        key = KEY_OPTIONS.get(_with_dashes(option))
        if key is not None:
            if not queue or (not equals and queue[0].startswith("-")):
                problem += f"; it must be followed by the value of {key}"
                if queue:
                    problem += f"; if this is the value, write {option}={queue[0]}"
                raise UserError(f"{word} {problem}")
            overrides.append(f"{key}={json.dumps(queue.pop(0), ensure_ascii=False)}")
            continue
        if option != SET_OPTION:
            rest.append(word)
            continue

        # --set, with all words of the form key=value that follow.
        count = len(overrides)
        while queue and not queue[0].startswith("-") and "=" in queue[0]:
            overrides.append(queue.pop(0))
        if len(overrides) == count:
            raise UserError(
                f"--set {problem}; expected key=value ..., such as --set train-iters=100 "
                "save=runs/a"
            )
    return overrides, rest


def run_main(main: Callable[[], int | None]) -> int:
    """Run an entry point and return its exit status. Every exception except SystemExit becomes one
    line on stderr:

    - UserError: status 2. The error of another rank is not printed again.
    - In a rank, a lost connection to another rank: status 3.
    - KeyboardInterrupt: status 130. If its only argument is a string, the line contains it.
    - The reader of standard output has exited, as in `... | head`: no line, status 141.
    - Any other: status 70, or 2 in a user's own positional method, whose file and line are named.
      The traceback is written to a file, which the line names.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names in messages may be invalid UTF-8.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = main() or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # some panics of Rust libraries are not derived from Exception
        status, text = _explain(error)
        if isinstance(error, UserError) and error.printed_by_other_rank:
            return status
        if status in (EXIT_STATUS_OF_USER_ERROR, EXIT_STATUS_OF_UNEXPECTED_ERROR):
            rank = os.environ.get("RANK", "0")
            place = "error" if rank == "0" else f"error on rank {rank}"
            text = f"{place}: {text}"
        if text:
            with contextlib.suppress(OSError):
                print(visible(redact(text)), file=sys.stderr, flush=True)
        return status


def _explain(error: BaseException) -> tuple[int, str]:
    """The exit status, and the line to print, if any. Writes the log of an unexpected error."""
    if isinstance(error, UserError):
        return EXIT_STATUS_OF_USER_ERROR, str(error)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_STATUS_OF_INTERRUPT, "; ".join(filter(None, ("interrupted", str(error))))
    if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
        # Otherwise, the interpreter would report the same error when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_STATUS_OF_BROKEN_PIPE, ""
    rank = os.environ.get("RANK")
    if rank and isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)):
        reason, _, _ = first_line(error).partition(". ")
        return EXIT_STATUS_OF_LOST_CONNECTION, (
            f"rank {rank} on {socket.gethostname()} stops: another rank has ended; its messages "
            f"say why ({reason})"
        )

    # Unexpected errors: what they usually mean, and where.
    status, cause = EXIT_STATUS_OF_UNEXPECTED_ERROR, f"{Path(sys.argv[0]).name} failed"
    problem = type(error).__name__
    if str(error).strip():
        problem += f": {first_line(error)}"
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(problem):
        problem = f"out of memory ({problem})"
    elif isinstance(error, RecursionError):
        problem = f"the input is nested too deeply ({problem})"
    elif place := _place_in_plugin(error):
        status, cause = EXIT_STATUS_OF_USER_ERROR, f"{place} (see docs/adding-a-method.md)"

    # The traceback is in a file, or on stderr if no folder is writable.
    text = f"{cause}: {redact(problem)[:_MAX_LINE]}"
    report = _error_report(error)
    path = _write_error_log(report)
    if path is None:
        with contextlib.suppress(OSError):
            print(report, file=sys.stderr)
        return status, text
    return status, f"{text}; traceback: {path}"


def _place_in_plugin(error: BaseException) -> str | None:
    """Where in a user's own positional method an exception was raised; None if it was not."""
    # Not imported for it, because torch is slow to import.
    registry = sys.modules.get("kerple.positional.registry")
    if registry is None:
        return None
    place: str | None = registry.place_in_plugin(error)
    return place


def _stdout_has_no_reader() -> bool:
    """True if stdout is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return False


def _error_report(error: BaseException) -> str:
    """What a developer needs, without secrets: time, command line, versions, traceback."""
    torch = sys.modules.get("torch")
    lines = [
        time.strftime("%Y-%m-%d %H:%M:%S %z"),
        f"command: {' '.join(sys.argv)}",
        f"Python {platform.python_version()}, torch "
        f"{getattr(torch, '__version__', 'not imported')}, {platform.platform()}, rank "
        f"{os.environ.get('RANK', '0')} of {os.environ.get('WORLD_SIZE', '1')}",
        "".join(traceback.format_exception(error)),
    ]
    return visible(redact("\n".join(lines)))


def _write_error_log(report: str) -> Path | None:
    """Write a new file, readable only by its owner, in the working or the temporary folder; None if
    neither works.
    """
    name = time.strftime(f"error-%Y%m%d-%H%M%S-{os.getpid()}.log")
    for folder in (Path(), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(report)
            return folder / name
    return None
