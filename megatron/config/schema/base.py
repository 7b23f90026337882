"""The base class of all sections, the declaration of a field, and the value types.

The path of a key is its place in the YAML: `("save",)` for a top-level key,
`("optimizer", "params", "lr")` for a nested one. A path that ends in `"*"` collects all keys of
that mapping that no other field claims.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from megatron.utils.command_line import MAX_INT

KeyPath = tuple[str, ...]
WILDCARD = "*"


class ConfigSection(BaseModel):
    """A frozen group of keys. Strict: no implicit type conversion ("2" is not 2, 1 is not true), no
    unknown names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def contradictions(self) -> Iterator[str]:
        """One message for each contradiction between keys of this section, for the loader.

        A pydantic validator would stop at the first one and hide those of several sections.
        """
        yield from ()

    def warnings(self) -> Iterator[str]:
        """One message for each key whose meaning in GPT-NeoX differs or is easily mistaken."""
        yield from ()


def field(
    default: Any,
    description: str,
    *,
    path: str | None = None,
    aliases: tuple[str, ...] = (),
    placeholders: bool = False,
    **constraints: Any,
) -> Any:
    """Declare a field, which is a key of the YAML files.

    Args:
        default: its value if it is not set; `...` if it is required.
        path: its dotted path in the YAML, if that is not the name of the field.
        aliases: other dotted paths with the same meaning; setting two of them is an error.
        placeholders: `{key}` in the value is replaced by the value of that key.
        constraints: passed to pydantic's Field (ge, gt, le, lt, min_length ...).
    """
    extra = {"path": path, "aliases": list(aliases), "placeholders": placeholders}
    return Field(
        default,
        description=" ".join(description.split()),
        json_schema_extra=cast(Any, extra),
        **constraints,
    )


def field_path(name: str, info: FieldInfo) -> KeyPath:
    """The path of a field in the YAML."""
    return tuple((_extra(info)["path"] or name).split("."))


def field_aliases(info: FieldInfo) -> list[KeyPath]:
    """Other paths in the YAML with the same meaning."""
    return [tuple(alias.split(".")) for alias in _extra(info)["aliases"]]


def has_placeholders(info: FieldInfo) -> bool:
    """True if `{key}` in the value of the field is replaced."""
    return bool(_extra(info)["placeholders"])


def is_path(info: FieldInfo) -> bool:
    """True if the value of the field is a path or a list of paths."""
    return info.annotation in (PathText | None, Paths | None)


def is_integer(info: FieldInfo) -> bool:
    """True if the value of the field is an integer."""
    return info.annotation in (int, Int | None)


def _extra(info: FieldInfo) -> dict[str, Any]:
    return cast(dict[str, Any], info.json_schema_extra)


def integral(value: Any) -> Any:
    """YAML reads 1.0e5 as a float. An integral float is accepted as an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_INT:
        return int(value)
    return value


def as_written(value: Any) -> Any:
    """The value of a field as in a YAML file, where a list of one entry may be the entry."""
    if not isinstance(value, tuple):
        return value
    if len(value) == 1:
        return value[0]
    return list(value)


def _number_as_list(value: Any) -> Any:
    """A single value is accepted instead of a list."""
    if isinstance(value, int | float):
        return [value]
    return value


def _text_as_list(value: Any) -> Any:
    """A single value is accepted instead of a list."""
    if isinstance(value, str):
        return [value]
    return value


def _lower(value: Any) -> Any:
    if isinstance(value, str):
        return value.lower()
    return value


def _swish_to_silu(name: Any) -> Any:
    if name == "swish":
        return "silu"
    return name


# Integers, and lists of them.
Int = Annotated[int, BeforeValidator(integral)]
# strict=False: YAML has lists, not tuples. The items are still strict.
Ints = Annotated[tuple[Annotated[Int, Field(ge=1)], ...], Field(strict=False)]
Steps = Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(strict=False)]
# A single one is accepted instead of a list, as for the types below.
Widths = Annotated[
    tuple[Annotated[Int, Field(ge=1, le=2**31)] | None, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_number_as_list),
]


def _not_blank(path: str) -> str:
    if not path.strip():
        raise ValueError("must be a path (remove the key, or set it to null, if there is none)")
    return path


# A path of a file or folder.
PathText = Annotated[str, AfterValidator(_not_blank)]
Texts = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_text_as_list)]
Paths = Annotated[tuple[PathText, ...], Field(strict=False), BeforeValidator(_text_as_list)]
Weights = Annotated[tuple[Annotated[float, Field(gt=0, le=1e30)], ...], Field(strict=False)]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], Field(strict=False)]

# Names and mappings.
CaseInsensitive = BeforeValidator(_lower)
SwishIsSilu = BeforeValidator(_swish_to_silu)
InitMethod = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
    "single_residual_scaled_normal",
]
