"""Sorting merged keys into groups: supported, accepted without effect, refused, unknown."""

import difflib
import typing
from dataclasses import dataclass, field
from typing import Any

from megatron.config import neox_compat as neox_keys
from megatron.config.declared import ALIASES, FIELDS, MAPPINGS, KeyPath
from megatron.config.merging import Merged
from megatron.config.schema import GROUPS
from megatron.config.schema.base import REST
from megatron.utils.errors import UserError
from megatron.utils.secrets import is_secret_name

_MOST_SUGGESTIONS = 3


@dataclass
class Sorted:
    """Values by group and field, and what to tell the user about keys without effect."""

    groups: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in GROUPS})
    notices: list[str] = field(default_factory=list)


def sort_keys(merged: Merged) -> Sorted:
    """Give every value to the field that declares its place.

    Raises UserError for a key that is refused or that nobody knows; the latter with the nearest known ones.
    """
    result = Sorted()
    for name, value in merged.values.items():
        _place((name,), value, merged, result)
    return result


def _place(path: KeyPath, value: Any, merged: Merged, result: Sorted) -> None:
    if path in FIELDS:
        group, name = FIELDS[path]
        result.groups[group][name] = value
    elif path in MAPPINGS:
        if value is not None and not isinstance(value, dict):
            raise UserError(f"{_where(path, merged)} must be a mapping of {', '.join(_siblings(path))}, not {value!r}")
        for key, inner in (value or {}).items():
            _place((*path, str(key)), inner, merged, result)
    elif neox_keys.is_known(".".join(path)):
        reason = neox_keys.refusal(".".join(path), value)
        if reason is not None:
            raise UserError(f"{_where(path, merged)} is known to GPT-NeoX but not supported here: {reason}")
        effect = neox_keys.WITHOUT_EFFECT.get(".".join(path))
        # What is off asks for nothing, so there is nothing to say.
        if effect is not None and value:
            result.notices.append(f"{_where(path, merged)} has no effect here: {effect}")
    elif (*path[:-1], REST) in FIELDS and path[-1] in (_rest_names((*path[:-1], REST)) or {path[-1]}):
        group, name = FIELDS[(*path[:-1], REST)]
        result.groups[group].setdefault(name, {})[path[-1]] = value
    else:
        raise UserError(_unknown(path, merged))


def _where(path: KeyPath, merged: Merged) -> str:
    """`FILE:LINE: "key"`, the key as it was written."""
    return f'{merged.places[path[0]]}: "{".".join((merged.written[path[0]], *path[1:]))}"'


def _siblings(path: KeyPath) -> list[str]:
    """Supported names that may stand in the mapping at this path."""
    depth = len(path)
    inside = {other[depth] for other in (*FIELDS, *MAPPINGS, *ALIASES) if other[:depth] == path and len(other) > depth}
    return sorted((inside - {REST}) | _rest_names((*path, REST)))


def _rest_names(path: KeyPath) -> set[str]:
    """Names that a collecting field is restricted to; none if it takes any."""
    if path not in FIELDS:
        return set()
    group, name = FIELDS[path]
    key_type, _ = typing.get_args(GROUPS[group].model_fields[name].annotation)
    return set(typing.get_args(key_type))


def _unknown(path: KeyPath, merged: Merged) -> str:
    where = _where(path, merged)
    if is_secret_name(path[-1]):
        return (
            f"{where} looks like a secret, and a configuration is copied into checkpoints and logs; "
            "remove it (for Weights & Biases set the environment variable WANDB_API_KEY)"
        )
    # Supported keys first; one that stands deeper (betas) with the way to it (optimizer.params.betas); then all others.
    places = {name: (*path[:-1], name) for name in _siblings(path[:-1])}
    for deeper in FIELDS:
        if deeper[: len(path) - 1] == path[:-1] and deeper[-1] != REST:
            places.setdefault(deeper[-1], deeper)
    others = {other[-1]: other for other in (tuple(key.split(".")) for key in neox_keys.known())}
    for candidates in (places, others):
        near = difflib.get_close_matches(path[-1].replace("-", "_"), candidates, n=_MOST_SUGGESTIONS, cutoff=0.6)
        if near:
            break
    else:
        candidates, near = places, difflib.get_close_matches(path[-1], places, n=1, cutoff=0.0)
    names = ", ".join(".".join(candidates[name]) for name in near)
    return f"{where} is not a known key; nearest known: {names} (all keys: configs/neox_arguments.md)"
