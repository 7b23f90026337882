"""Numbers computed by the modules that DAPE's authors released: parameters, input scores and final
scores.

Source: https://github.com/chuanyang-Zheng/DAPE, float32 on a CPU, 4 heads, length 20. `numbers.pt`
contains data only.
"""

from pathlib import Path

import torch
from torch import Tensor

from kerple.positional import ModelShape, PositionalMethod, build

NUMBERS = Path(__file__).parents[1] / "data/dape_release/numbers.pt"
# Prefixes of the release's parameters -> ours.
STATIC = {
    "bias_p": "bias_p",
    "bias_a": "bias_a",
    "mlp.0": "first",
    "mlp.2": "second",
    "L_multiplier": "m",
    "c": "c",
}


def load_release(name: str) -> tuple[PositionalMethod, Tensor, Tensor]:
    """(method with the released parameters, scores `[2, 4, 20, 20]`, final scores with zeros above
    the diagonal).
    """
    numbers = torch.load(NUMBERS, weights_only=True)[name]
    released = numbers["parameters"]
    options = {}
    if "init_L" in released:
        options["threshold"] = float(released["init_L"])
    if "dape_v2" in name:
        options["kernel_size"] = released["mlp2.0.weight"].shape[-1]
    method = build(name.split("_kernel")[0], ModelShape(4, 8, 32, 1, 20), **options)
    prefix = "" if name == "fire" else "static."
    ours = {"mlp2.0": "first", "mlp2.2": "second"} | {
        theirs: prefix + name for theirs, name in STATIC.items()
    }
    state = {}
    for key, value in released.items():
        for theirs, name in ours.items():
            if key == theirs or key.startswith(theirs + "."):
                state[name + key[len(theirs) :]] = value.reshape(1) if value.dim() == 0 else value
    method.load_state_dict(
        {key: value.reshape(method.state_dict()[key].shape) for key, value in state.items()}
    )
    return method, numbers["scores"], numbers["final"]
