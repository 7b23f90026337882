"""`kerple doctor`: attention (`kerple.doctor`), and on a GPU the kernels of this project's blocks
and of its loss.
"""

import sys
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from kerple import doctor
from kerple.attention import self_check
from kerple.doctor import DTYPES, Check
from megatron.model import fused_block, loss
from megatron.model.layers import make_mlp, make_norm
from megatron.model.settings import ModelSettings
from megatron.utils.command_line import OptionParser

# The options of a block that select its kernels.
BLOCKS: dict[str, dict[str, Any]] = {
    "block, LayerNorm and GELU": {
        "norm": "layernorm",
        "gated": False,
        "activation_function": "gelu",
    },
    "block, RMSNorm and SwiGLU": {"norm": "rmsnorm", "gated": True, "activation": "swiglu"},
}


def main(argv: Sequence[str] | None = None) -> int:
    return doctor.main(argv, check_model_kernels, OptionParser)


def check_model_kernels(device: torch.device) -> list[list[Check]]:
    """A row per kernel, a column per dtype; no rows for a device that does not use the kernels."""
    if not fused_block.uses_kernels(device, torch.float32, 64):
        return []
    rows = []
    place = self_check.device_name(device)
    failures = {"loss": loss.kernel_failure} | {name: partial(_failure, name) for name in BLOCKS}
    for name, failure_of in failures.items():
        row = []
        for dtype in DTYPES:
            kind = str(dtype).removeprefix("torch.")
            failure = failure_of(device, dtype)
            row.append(Check(place, name, kind, 64, ["fused"], failure=failure))
        rows.append(row)
    return rows


def _failure(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernels of a block; None if they are right."""
    config: Any = SimpleNamespace(
        hidden_size=64,
        mlp_features=256,
        norm_epsilon=1e-5,
        use_bias_in_norms=True,
        use_bias_in_mlp=True,
        **BLOCKS[name],
    )
    mlp = make_mlp(ModelSettings(config, 64))
    return fused_block.kernel_failure(make_norm(config), mlp, device, dtype)


if __name__ == "__main__":
    sys.exit(main())
