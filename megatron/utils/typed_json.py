"""JSON from outside, checked against a type. Errors name the place, the field and the value."""

import re
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, FiniteFloat, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from megatron.utils.errors import UserError, shortened, visible

T = TypeVar("T")

# The value types of these files. Infinity and NaN, 1e999, and integers that do not fit into 64 bits
# are rejected.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Float = FiniteFloat
Fraction = Annotated[Float, Field(ge=0, le=1)]

# Control characters are escaped, because these texts are printed.
Text = Annotated[str, Field(max_length=4096), AfterValidator(visible)]
Name = Annotated[str, Field(max_length=300), AfterValidator(visible)]

# Where pydantic's own text uses Python's terms instead of those of YAML and JSON.
_MESSAGES = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "missing": "is missing",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} item(s)",
}
_SHOWN_CHARACTERS = 60


def parse_json(content: bytes, adapter: TypeAdapter[T], place: str) -> T:
    """Parse JSON and check it against the adapter's type, see `load_json` and `check_json`."""
    return check_json(load_json(content, place), adapter, place)


def load_json(content: bytes, place: str, *, allow_nan: bool = False) -> Any:
    """Parse JSON. Objects nested deeper than 200, lone surrogates and, unless `allow_nan`, NaN and
    Infinity are rejected.

    Raises UserError, starting with `place`: the file, and the line if each line is a document.
    """
    try:
        return from_json(content, allow_inf_nan=allow_nan)
    except ValueError as error:
        where = str(error)
        if b"\n" not in content:
            where = where.replace("line 1 ", "")
        raise UserError(f"{place}: not valid JSON ({where})") from None


def check_json(value: Any, adapter: TypeAdapter[T], place: str) -> T:
    """The value, without keys that the type does not have. Types are not converted: "2" and true
    are not 2.

    Raises UserError, starting with `place`, that names the first wrong field.
    """
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise UserError(f"{place}: {error_text(error.errors(include_url=False)[0])}") from None


def error_text(error: ErrorDetails) -> str:
    """The field, what is wrong with it, and its value, of an error that pydantic found."""
    # The path of the field, as in Python.
    message = problem_text(error)
    field = ""
    for part in error["loc"]:
        form = "[{}]" if isinstance(part, int) else ".{}"
        field += form.format(part)

    # Simple values are shown, of others only the type.
    if error["type"] != "missing":
        value: Any = error["input"]
        text = f"a value of type {type(value).__name__}"
        if isinstance(value, str | int | float | None):
            text = repr(value)
        message += f", not {shortened(text, _SHOWN_CHARACTERS)}"
    return visible(f"{field.lstrip('.')} {message}".strip())


def problem_text(error: ErrorDetails) -> str:
    """What is wrong with a value, such as "must be an integer"."""
    if error["type"] in _MESSAGES:
        return _MESSAGES[error["type"]].format(**error.get("ctx", {}))
    return re.sub(r"^\w+ should ", "must ", error["msg"].removeprefix("Value error, "))
