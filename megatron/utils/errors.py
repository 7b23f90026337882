"""The one exception that means: the user's input is wrong, and the message says what to do."""


class UserError(Exception):
    """Bad input from the user. The message names the key, file or value, and what to do about it.

    Entry points print it as one line and exit with status 2; no traceback is shown.
    """
