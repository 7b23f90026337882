"""The sections of the configuration: every supported key is declared once, as a field of a section."""

from megatron.config.schema.data import DataConfig, TokenizerConfig, split_shares
from megatron.config.schema.model import ModelConfig
from megatron.config.schema.optimizer import OptimizerConfig, PrecisionConfig, ScheduleConfig
from megatron.config.schema.output import CheckpointConfig, LoggingConfig
from megatron.config.schema.parallel import BatchConfig, BatchSizes, LauncherConfig, ParallelConfig
from megatron.config.schema.training import CurriculumConfig, EvaluationConfig, GenerationConfig, TrainingConfig

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
