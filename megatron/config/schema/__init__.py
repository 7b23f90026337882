"""The sections of the configuration, and where their fields are in the YAML."""

import typing

from pydantic import BaseModel, ConfigDict

from megatron.config.schema.base import ConfigSection, KeyPath, field_aliases, field_path
from megatron.config.schema.data import DataConfig, TokenizerConfig
from megatron.config.schema.model import ModelConfig
from megatron.config.schema.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.config.schema.output import CheckpointConfig, LoggingConfig
from megatron.config.schema.parallel import BatchConfig, LauncherConfig, ParallelConfig
from megatron.config.schema.training import (
    CurriculumConfig,
    EvaluationConfig,
    GenerationConfig,
    TrainingConfig,
)


class Sections(BaseModel):
    """The sections; `Config` adds how to read and change them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    curriculum: CurriculumConfig
    precision: PrecisionConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    training: TrainingConfig
    logging: LoggingConfig
    evaluation: EvaluationConfig
    generation: GenerationConfig
    launcher: LauncherConfig


# Sections by name, and the paths of their fields in the YAML. A path that ends in WILDCARD collects
# all keys of its mapping that no other field claims.
SECTIONS: dict[str, type[ConfigSection]] = {}
FIELDS: dict[KeyPath, tuple[str, str]] = {}  # path -> (section, field)
ALIASES: dict[KeyPath, KeyPath] = {}  # other path with the same meaning -> path
for _section, _field in Sections.model_fields.items():
    SECTIONS[_section] = _model = typing.cast(type[ConfigSection], _field.annotation)
    for _name, _field in _model.model_fields.items():
        FIELDS[field_path(_name, _field)] = (_section, _name)
        ALIASES.update(dict.fromkeys(field_aliases(_field), field_path(_name, _field)))
# Keys whose value is a mapping that contains fields, such as `optimizer` and `optimizer.params`.
MAPPINGS: set[KeyPath] = {path[:depth] for path in FIELDS for depth in range(1, len(path))}


def canonical_path(key: str) -> KeyPath:
    """The path of a dotted key: `-` and `_` are the same in its first part, and an alias is
    resolved.
    """
    first, *rest = key.split(".")
    path = (first.replace("-", "_"), *rest)
    return ALIASES.get(path, path)
