"""The exception for wrong user input, and the text of other exceptions."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class UserError(Exception):
    """Wrong user input. The message names the key, file or value, and says how to fix it.

    Entry points print only the message and exit with status 2, without a traceback.

    Attributes:
        printed_by_other_rank: another rank raises the same error and prints it.
    """

    printed_by_other_rank = False


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra of this project."""
    return f"pip install 'kerple-neox[{extra}]' (in a clone: pip install '.[{extra}]')"


def import_package(name: str, extra: str, use: str) -> Any:
    """A package of an extra. Raises UserError, which begins with `use`, if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{use} needs the package {name}, which is not installed: {install_command(extra)}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_library_error(error: BaseException) -> bool:
    """Whether `error` is an Exception or a panic of a Rust library, which pyo3 derives from
    BaseException only.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn every exception of a library, also panics, into a UserError with this beginning."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise UserError(f"{problem}: {first_line(error)}") from error


def visible(text: str) -> str:
    r"""`text` with control characters and lone surrogates, but not \n and \t, as escapes."""
    shown = []
    for character in text:
        if not character.isprintable() and character not in "\n\t":
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


def shortened(text: str, limit: int = 200) -> str:
    """At most `limit` characters of `text`, with an ellipsis and the length if it is longer."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
