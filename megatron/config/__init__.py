"""YAML files -> one validated, typed, grouped configuration."""

from megatron.config.configuration import Config, check_vocabulary, load_config
from megatron.config.errors import UserError

__all__ = ["Config", "UserError", "check_vocabulary", "load_config"]
