"""The exception for wrong user input, and the text of other exceptions."""


class UserError(Exception):
    """Wrong user input. The message names the key, file or value, and says how to fix it.

    Entry points print only the message and exit with status 2, without a traceback.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or the name of its class if it has no text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
