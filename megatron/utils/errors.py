"""The exception for wrong user input, and the text of other exceptions."""


class UserError(Exception):
    """Wrong user input. The message names the key, file or value, and says how to fix it.

    Entry points print only the message and exit with status 2, without a traceback.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def visible(text: str) -> str:
    """`text` with control characters and lone surrogates as backslash escapes, except newlines and tabs."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(text: str, limit: int = 200) -> str:
    """At most `limit` characters of `text`, with an ellipsis and the length if it is longer."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
