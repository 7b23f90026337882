"""The declared keys as tables: which place in the YAML belongs to which field."""

from megatron.config.schema import GROUPS
from megatron.config.schema.base import field_aliases, field_path

KeyPath = tuple[str, ...]

# Place in the YAML -> (group, field). A place that ends in REST collects what no other field claims.
FIELDS: dict[KeyPath, tuple[str, str]] = {}
# Another place with the same meaning -> place in the YAML.
ALIASES: dict[KeyPath, KeyPath] = {}

for _group, _model in GROUPS.items():
    for _name, _field in _model.model_fields.items():
        FIELDS[field_path(_name, _field)] = (_group, _name)
        ALIASES.update(dict.fromkeys(field_aliases(_field), field_path(_name, _field)))

# Keys whose value is a mapping with fields in it, such as `optimizer` and `optimizer.params`.
MAPPINGS: set[KeyPath] = {path[:depth] for path in FIELDS for depth in range(1, len(path))}

PLACES: dict[tuple[str, str], KeyPath] = {field: path for path, field in FIELDS.items()}


def canonical_path(key: str) -> KeyPath:
    """The place of a dotted key: `-` and `_` are the same in its first part; an alias is the key it stands for."""
    first, *rest = key.split(".")
    path = (first.replace("-", "_"), *rest)
    return ALIASES.get(path, path)
