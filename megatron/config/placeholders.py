"""Paths that name other keys: `"save": "runs/{pos-emb}/{seed}"` gives every run of a matrix a folder of its own."""

import re
from typing import Any

from pydantic_core import PydanticUndefined

from megatron.config.declared import FIELDS
from megatron.config.merging import Merged
from megatron.config.schema import GROUPS
from megatron.utils.errors import UserError

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

# The keys that may hold placeholders: where a run writes, and what it is called.
_HOLDERS = [
    path[0]
    for path, (group, name) in FIELDS.items()
    if GROUPS[group].model_fields[name].json_schema_extra["placeholders"]
]


def fill_placeholders(merged: Merged) -> None:
    """Replace each `{key}` by that key's value, or its default.

    Raises UserError for a key that does not exist, has no value, or whose value is no text or number.
    """
    for holder in _HOLDERS:
        text = merged.values.get(holder)
        if isinstance(text, str):
            where = f'{merged.places[holder]}: "{merged.written[holder]}": '
            merged.values[holder] = _PLACEHOLDER.sub(lambda found, where=where: _value(found, merged, where), text)


def _value(found: re.Match[str], merged: Merged, where: str) -> str:
    name = found[1].replace("-", "_")
    field = FIELDS.get((name,))
    if field is None:
        raise UserError(f"{where}{found[0]} names no key with a single value; write {{pos-emb}} or {{seed}}, say")
    value: Any = merged.values.get(name)
    if value is None:
        value = GROUPS[field[0]].model_fields[field[1]].default
    if value is None or value is PydanticUndefined:
        raise UserError(f"{where}{found[0]} has no value; set {found[1]}")
    if isinstance(value, bool) or not isinstance(value, str | int | float) or (isinstance(value, str) and "{" in value):
        raise UserError(f"{where}{found[0]} is {value!r}; only plain text and numbers can be filled in")
    return str(value)
