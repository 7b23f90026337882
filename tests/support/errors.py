"""Errors that users see."""

from collections.abc import Callable

import pytest

from megatron.utils.errors import UserError


def assert_rejected(
    pattern: str, function: Callable[..., object], *arguments: object, **options: object
) -> None:
    """The call raises UserError, whose message matches `pattern`: keys, files and values, not the
    wording.
    """
    with pytest.raises(UserError, match=pattern):
        function(*arguments, **options)
