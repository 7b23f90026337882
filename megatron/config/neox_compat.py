"""Keys of GPT-NeoX that have no effect in this project: unsupported or ignored. neox_compat.yml lists them."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Unsupported:
    """Why a key is not supported or what to use instead, and the values (besides null) that mean "off"."""

    reason: str
    off: tuple[Any, ...] = ()

    def is_off(self, value: Any) -> bool:
        """True for the values that mean "off", an empty mapping, and a mapping with `enabled: false`."""
        if isinstance(value, dict):
            return not value or value.get("enabled") is False
        return any(type(value) is type(off) and value == off for off in (None, *self.off))


def _read_keys() -> tuple[dict[str, Unsupported], dict[str, str]]:
    """The unsupported and the ignored keys of neox_compat.yml."""
    data = yaml.safe_load((Path(__file__).with_suffix(".yml")).read_text(encoding="utf-8"))
    unsupported: dict[str, Unsupported] = {}
    for entry in data["unsupported"]:
        unsupported |= dict.fromkeys(entry["keys"], Unsupported(entry["reason"], tuple(entry.get("neutral", ()))))
    ignored: dict[str, str] = {}
    for entry in data["ignored"]:
        ignored |= dict.fromkeys(entry["keys"], entry["reason"])
    return unsupported, ignored


UNSUPPORTED, IGNORED = _read_keys()

ATTENTION_CONFIG = "attention_config"
_DENSE_ATTENTION = ("global", "flash")


def _is_bf16(keys: Mapping[str, Any]) -> bool:
    fp16, bf16 = (keys.get(name) or {} for name in ("fp16", "bf16"))
    return (
        keys.get("precision") == "bfloat16"
        or bf16.get("enabled") is True
        or (fp16.get("enabled") is True and fp16.get("type") in ("bf16", "bfloat16"))
    )


# Keys with a neutral value that depends on the other keys.
_IS_NEUTRAL: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "data_types": lambda value, keys: (
        value == {"grad_accum_dtype": "fp32"}
        and _is_bf16(keys)
        and (keys.get("zero_optimization") or {}).get("stage", 0) <= 1
    ),
}


def known_keys() -> list[str]:
    """All keys of this file, nested ones with dots."""
    return [*UNSUPPORTED, *IGNORED, ATTENTION_CONFIG]


def is_known(key: str) -> bool:
    """True if the key is in this file."""
    return key in UNSUPPORTED or key in IGNORED or key == ATTENTION_CONFIG


def unsupported_reason(key: str, value: Any, keys: Mapping[str, Any]) -> str | None:
    """Why this value of a known key is not supported, or None if it is accepted.

    keys: the values of all top-level keys, on which the neutral value of some keys depends.
    """
    if key == ATTENTION_CONFIG and value is not None:
        return _attention_reason(value, keys.get("num_layers"))
    if key not in UNSUPPORTED or UNSUPPORTED[key].is_off(value):
        return None
    try:
        if key in _IS_NEUTRAL and _IS_NEUTRAL[key](value, keys):
            return None
    except (AttributeError, TypeError):
        pass  # another key is missing or wrong, which is reported separately
    return UNSUPPORTED[key].reason


def _attention_reason(value: Any, num_layers: Any) -> str | None:
    """The value is one type per layer, or [[[type, type ...], repetitions] ...]; "all" repeats a pattern for all
    layers. `flash` is an implementation of dense attention.
    """
    expected = f'expected [[["global"], {num_layers or "NUM_LAYERS"}]]'
    types: set[Any] = set()
    count = 0  # without a list of all layers, which a large number would make too long
    try:
        for item in value:
            if isinstance(item, str):
                types.add(item)
                count += 1
            elif item[1] == "all":
                types, count = set(item[0]), len(item[0]) * (num_layers // len(item[0]))
                break
            else:
                types.update(item[0])
                count += len(item[0]) * max(0, operator.index(item[1]))
    except (TypeError, IndexError, ZeroDivisionError):
        return expected
    sparse = sorted({str(type_) for type_ in types if type_ not in _DENSE_ATTENTION})
    if sparse:
        hint = "; for a sliding window in these layers, set sliding_window_width to a list" if "local" in sparse else ""
        return f"only dense attention (global, flash) is supported, not {', '.join(sparse)}{hint}"
    return None if count == num_layers else f"it describes {count} layers, but num_layers is {num_layers}; {expected}"
