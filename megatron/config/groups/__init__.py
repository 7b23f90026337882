"""The groups of the configuration: every supported key is declared here, once, as a field."""

from megatron.config.groups.base import Group
from megatron.config.groups.checkpoint import CheckpointConfig
from megatron.config.groups.data import DataConfig, TokenizerConfig
from megatron.config.groups.evaluation import EvaluationConfig, GenerationConfig
from megatron.config.groups.launcher import LauncherConfig
from megatron.config.groups.model import ModelConfig
from megatron.config.groups.optimization import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.config.groups.parallel import BatchConfig, ParallelConfig
from megatron.config.groups.training import LoggingConfig, TrainingConfig

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
