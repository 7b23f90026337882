"""The command `kerple COMMAND [options]`.

This is a module of its own, because the package `kerple` needs only torch and never imports
`megatron`, and because another package named `megatron` may hide this project's. It imports a
command's module when the command runs.
"""

import sys

if __name__ == "__main__" and sys.path[0] in sys.path[1:]:
    # Python starts sys.path with the folder of this file, which may be site-packages: leave it
    # where it was.
    del sys.path[0]

from dataclasses import dataclass
from pkgutil import resolve_name

from kerple import __version__


@dataclass(frozen=True)
class Command:
    """A command of the table below.

    Attributes:
        function: MODULE:NAME of a function that takes no arguments, reads sys.argv, and returns an
            exit status or None.
        text: what the command does.
        extra: the extra of the distribution that installs what the command needs; None if it needs
            only torch.
    """

    function: str
    text: str
    extra: str | None


COMMANDS = {
    "train": Command("megatron.cli.deepy:train", "train a model, on one process per GPU", "train"),
    "evaluate": Command(
        "megatron.cli.evaluate:main", "measure perplexity on long texts, or run tasks", "eval"
    ),
    "generate": Command("megatron.cli.generate:main", "generate text from a checkpoint", "eval"),
    "prepare": Command(
        "megatron.cli.prepare_data:main", "prepare a dataset and its tokenizer", "data"
    ),
    "init": Command(
        "megatron.cli.init:main",
        "write the configuration of an experiment on your own text",
        "train",
    ),
    "report": Command(
        "megatron.cli.report:main", "write tables and figures from stored results", "report"
    ),
    "sweep": Command("megatron.cli.sweep:main", "train, evaluate and report many runs", "all"),
    "convert": Command(
        "megatron.cli.convert:main", "convert checkpoints to and from Hugging Face", "eval"
    ),
    "inspect": Command("megatron.cli.inspect:main", "show what a checkpoint contains", "eval"),
    "import-release": Command(
        "megatron.cli.import_release:main", "unpack and verify a released checkpoint", "eval"
    ),
    "chomsky": Command(
        "megatron.cli.chomsky:main", "run the Chomsky-hierarchy benchmark", "report"
    ),
    "doctor": Command(
        "megatron.cli.doctor:main", "check the kernels on this machine, for bug reports", None
    ),
}


def main() -> int:
    """Run the command that sys.argv names; returns its exit status."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"kerple-neox {__version__}")
        return 0
    if name not in COMMANDS:
        print(
            f"error: {name!r} is not a command; choose one of {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    command = COMMANDS[name]
    sys.argv = [f"kerple {name}", *words]
    extra = command.extra
    if extra is None:
        return resolve_name(command.function)() or 0
    import check_megatron  # noqa: F401
    from megatron.utils.command_line import run_main

    return run_main(lambda: run(name, command, extra))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.text}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kerple COMMAND [options]",
            "",
            *lines,
            "",
            "`kerple COMMAND --help` lists the options of a command; `kerple --version` prints the "
            "version.",
        ]
    )


def run(name: str, command: Command, extra: str) -> int | None:
    """Run a command of `megatron`. Raises UserError if a package that it needs is not installed."""
    from megatron.utils.errors import UserError, install_command

    try:
        status: int | None = resolve_name(command.function)()
        return status
    except ModuleNotFoundError as error:
        raise UserError(
            f"kerple {name} needs the module {error.name}, which is not installed: "
            f"{install_command(extra)}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
