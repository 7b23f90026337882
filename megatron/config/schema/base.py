"""What all groups share: the base model, the field helper and the value types.

A field's path is where its value stands in the YAML: `("save",)` for a key of its own, `("optimizer", "params", "lr")`
for a nested one; a path that ends in `"*"` collects what no other field claims under that key.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

REST = "*"


class Group(BaseModel):
    """A frozen set of keys. Strict: text is no number, a number is no truth value; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(
    default: Any,
    description: str,
    *,
    path: str | None = None,
    aliases: tuple[str, ...] = (),
    placeholders: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a key of the configuration.

    default: the value without the key, or `...` where the key must be given.
    path: dotted place in the YAML when that is not the field's own name.
    aliases: other dotted places that mean the same; giving two of them is an error.
    placeholders: `{key}` in the value is replaced by that key's value.
    constraints: pydantic's (ge, gt, le, lt, min_length ...).
    """
    extra = {"path": path, "aliases": list(aliases), "placeholders": placeholders}
    return Field(default, description=" ".join(description.split()), json_schema_extra=extra, **constraints)


def field_path(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Where the value of a field stands in the YAML."""
    return tuple((field.json_schema_extra["path"] or name).split("."))


def field_aliases(field: FieldInfo) -> list[tuple[str, ...]]:
    """Other places in the YAML with the same meaning."""
    return [tuple(alias.split(".")) for alias in field.json_schema_extra["aliases"]]


def _whole_number(value: Any) -> Any:
    """1.0e5 is a float to YAML, but a whole number to whoever wrote it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _paths(value: Any) -> Any:
    """One path may be given without the brackets of a list."""
    return (value,) if isinstance(value, str) else _tuple(value)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_whole_number)]
Ints = Annotated[tuple[Annotated[Int, Field(ge=1)], ...], BeforeValidator(_tuple)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_paths)]
Weights = Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_tuple)]
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], BeforeValidator(_tuple)
]
CaseInsensitive = BeforeValidator(_lower)
