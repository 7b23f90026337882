"""YAML files -> one validated, typed, grouped configuration."""

from megatron.config.loader import Config, check_vocabulary, load_config
from megatron.utils.errors import UserError

__all__ = ["Config", "UserError", "check_vocabulary", "load_config"]
