"""`kerple doctor`: attention (`kerple.doctor`), and on a GPU the kernels of this project's blocks
and of its loss.
"""

import sys
from collections.abc import Sequence
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
    """A row per kernel and a column per dtype; no rows for a device that does not use
    the kernels.
    """
    if not fused_block.uses_kernels(device, torch.float32, 64):
        return []
    rows = []
    for name in ("loss", *BLOCKS):
        row = []
        for dtype in DTYPES:
            failure = (
                loss.kernel_failure(device, dtype)
                if name == "loss"
                else _block_failure(name, device, dtype)
            )
            kind = str(dtype).removeprefix("torch.")
            row.append(
                Check(self_check.device_name(device), name, kind, 64, ["fused"], failure=failure)
            )
        rows.append(row)
    return rows


def _block_failure(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    config: Any = SimpleNamespace(
        hidden_size=64,
        mlp_features=256,
        norm_epsilon=1e-5,
        use_bias_in_norms=True,
        use_bias_in_mlp=True,
        **BLOCKS[name],
    )
    block: Any = SimpleNamespace(
        input_layernorm=make_norm(config), mlp=make_mlp(ModelSettings(config, 64))
    )
    return fused_block.kernel_failure(block, device, dtype)


if __name__ == "__main__":
    sys.exit(main())
