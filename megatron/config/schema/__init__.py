"""The groups of keys: every supported key is declared once, as a field of a group."""

from megatron.config.schema.curriculum import CurriculumConfig
from megatron.config.schema.evaluation import EvaluationConfig, GenerationConfig
from megatron.config.schema.model import ModelConfig
from megatron.config.schema.parallel import BatchConfig, BatchSizes, LauncherConfig, ParallelConfig
from megatron.config.schema.training import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
    split_shares,
)

__all__ = [
    "BatchConfig",
    "BatchSizes",
    "CheckpointConfig",
    "CurriculumConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerationConfig",
    "LauncherConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "split_shares",
]
