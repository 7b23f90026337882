"""The configuration: keys from files and the command line, sorted into validated groups."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from megatron.config import schema as groups
from megatron.config.checks import check_groups
from megatron.config.declared import PLACES, canonical_path
from megatron.config.merging import Merged, merge, set_at
from megatron.config.placeholders import fill_placeholders
from megatron.config.schema.base import REST
from megatron.config.sorting import sort_keys
from megatron.config.yaml_files import Entry, Place, find_file, read_file
from megatron.utils.errors import UserError


class Config(BaseModel):
    """A complete, validated configuration. Frozen; made by load_config, from_flat or updated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: groups.ModelConfig
    parallel: groups.ParallelConfig
    batch: groups.BatchConfig
    optimizer: groups.OptimizerConfig
    schedule: groups.ScheduleConfig
    precision: groups.PrecisionConfig
    data: groups.DataConfig
    tokenizer: groups.TokenizerConfig
    checkpoint: groups.CheckpointConfig
    training: groups.TrainingConfig
    logging: groups.LoggingConfig
    evaluation: groups.EvaluationConfig
    generation: groups.GenerationConfig
    launcher: groups.LauncherConfig

    _flat: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def from_flat(cls, mapping: Mapping[str, Any], source: str = "configuration") -> "Config":
        """A configuration from GPT-NeoX's keys, nested as in its YAML; `source` names the mapping in errors.

        Raises UserError for whatever is wrong with it.
        """
        return _build(Entry(key, value, Place(source)) for key, value in mapping.items())

    def to_flat(self) -> dict[str, Any]:
        """The keys that were set, in GPT-NeoX's form (`optimizer: {type, params}` ...), with underscores.

        JSON can hold it, and from_flat gives the same configuration back.
        """
        return copy.deepcopy(self._flat)

    def updated(self, **keys: Any) -> "Config":
        """A copy with other values, validated anew. Nested keys with dots: updated(**{"optimizer.params.lr": 1e-3})."""
        flat = self.to_flat()
        for key, value in keys.items():
            set_at(flat, canonical_path(key), value, key)
        return Config.from_flat(flat)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should be told once: keys that are accepted without effect, and why."""
        return self._notices


def load_config(
    paths: Sequence[str | Path], config_dir: str | Path | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Merge YAML files and `key=value` overrides into one validated configuration.

    paths: files, in config_dir if given; the ending .yml may be left out. No key may stand in two of them.
    overrides: `key=value`, the value in YAML; nested keys with dots (optimizer.params.lr=1e-3).
    Raises UserError naming file, line and key.
    """
    entries = [entry for path in paths for entry in read_file(find_file(path, config_dir))]
    return _build(entries, overrides)


def check_vocabulary(config: Config, tokenizer_vocab_size: int) -> None:
    """Raises UserError if the tokenizer has more tokens than the model has rows for."""
    padded = config.model.padded_vocab_size
    if padded is not None and padded < tokenizer_vocab_size:
        raise UserError(
            f"padded_vocab_size is {padded}, but the tokenizer has {tokenizer_vocab_size} tokens; "
            "remove the key (it is computed) or use the tokenizer the model was trained with"
        )


def _build(entries: Iterable[Entry], overrides: Iterable[str] = ()) -> Config:
    merged = merge(entries, overrides)
    fill_placeholders(merged)
    result = sort_keys(merged)
    built = {}
    for name, model in groups.GROUPS.items():
        try:
            built[name] = model.model_validate(result.groups[name])
        except ValidationError as error:
            raise UserError(_describe(error, name, merged)) from None
    config = Config(**built)
    config._flat.update(copy.deepcopy(merged.values))
    config._notices = tuple(result.notices)
    check_groups(config)
    return config


def _describe(error: ValidationError, group: str, merged: Merged) -> str:
    """The first problem that pydantic found, as `FILE:LINE: "key": what is wrong`."""
    problem = error.errors()[0]
    field, *inside = problem["loc"]
    path = tuple(part for part in PLACES[group, field] if part != REST)
    if problem["type"] == "missing" and not inside:
        where = ", ".join(dict.fromkeys(place.source for place in merged.places.values()))
        description = groups.GROUPS[group].model_fields[field].description
        return f'{where or "configuration"}: key "{".".join(path)}" is missing: {description}'
    written = ".".join(
        (merged.written.get(path[0], path[0]), *path[1:], *(str(part) for part in inside if part != "[key]"))
    )
    message = problem["msg"].replace("Input should be", "must be")
    return f'{merged.places[path[0]]}: "{written}": {message}, not {problem["input"]!r}'
