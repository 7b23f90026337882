"""The configuration: YAML files and overrides, merged into one validated `Config` with typed
sections.
"""

from megatron.config.checks import check_vocabulary
from megatron.config.loader import Config, load_config
from megatron.utils.errors import UserError

__all__ = ["Config", "UserError", "check_vocabulary", "load_config"]
