"""The groups of the configuration: every supported key is declared here, once, as a field."""

from megatron.config.schema.base import Group
from megatron.config.schema.checkpoint import CheckpointConfig
from megatron.config.schema.data import DataConfig, TokenizerConfig
from megatron.config.schema.evaluation import EvaluationConfig, GenerationConfig
from megatron.config.schema.launcher import LauncherConfig
from megatron.config.schema.model import ModelConfig
from megatron.config.schema.optimization import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.config.schema.parallel import BatchConfig, ParallelConfig
from megatron.config.schema.training import LoggingConfig, TrainingConfig

GROUPS: dict[str, type[Group]] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "batch": BatchConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "checkpoint": CheckpointConfig,
    "training": TrainingConfig,
    "logging": LoggingConfig,
    "evaluation": EvaluationConfig,
    "generation": GenerationConfig,
    "launcher": LauncherConfig,
}
