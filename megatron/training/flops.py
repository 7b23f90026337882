"""Parameter counts, floating-point operations, and the peak throughput of a device, for the MFU.

This module needs only torch, so GPU benchmarks run without DeepSpeed.
"""

import re
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from megatron.model.gpt import positional_methods
from megatron.model.parallel import full_shape
from megatron.model.settings import Layout, ModelSettings

if TYPE_CHECKING:
    from megatron.config.schema.model import ModelConfig

# Dense bf16 peak in FLOP/s, from the vendors' data sheets, by a part of the device's name. The
# longest match counts.
PEAK_FLOPS = {
    "A100": 312e12,
    "A10": 125e12,
    "A10G": 70e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "RTX 6000 Ada": 364.2e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of the device in FLOP/s; None if unknown, as for slower variants of a GPU."""
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    if re.search(r"Laptop|Max-Q|\bMIG\b|\bD\b", device_name):  # MIG: a part of a GPU; D: RTX 4090 D
        return None
    matches = [name for name in PEAK_FLOPS if re.search(rf"(?<!\w){name}(?!\w)", device_name)]
    if not matches:
        return None
    return PEAK_FLOPS[max(matches, key=len)]


def count_parameters(
    layers: dict[int, nn.Module], settings: ModelSettings, layout: Layout | None = None
) -> dict[str, int]:
    """Count the parameters of the whole model. Copies on several ranks count once.

    Returns `total`, `positional` (of the positional methods) and `outside_embedding` (without the
    input embedding, unless it is also the output layer), from which `flops_per_token` computes.
    `layout`: in a distributed run.
    """
    positional: set[int] = set()
    for method in positional_methods(layers).values():
        positional.update(map(id, method.parameters()))
    counts = {"total": 0, "positional": 0, "embedding": 0}
    seen: set[int] = set()
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if id(parameter) in seen or getattr(parameter, "ds_pipe_replicated", False):
                continue
            seen.add(id(parameter))
            numel = full_shape(parameter, settings.tp.size).numel()
            counts["total"] += numel
            if id(parameter) in positional:
                counts["positional"] += numel
            elif index == 0 and name.startswith("word_embeddings"):
                counts["embedding"] += numel
    if layout is not None and layout.pipeline_size > 1:
        from megatron.core import parallel_state

        values = torch.tensor(list(counts.values()), device=layout.device)
        dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
        counts = dict(zip(counts, values.tolist(), strict=True))
    embedding, counts["outside_embedding"] = counts.pop("embedding"), counts["total"]
    if settings.config.no_weight_tying:
        counts["outside_embedding"] -= embedding
    return counts


def flops_per_token(outside_embedding: int, config: "ModelConfig", seq_length: int) -> float:
    """Floating-point operations of forward and backward pass per token, for the MFU.

    6 per parameter outside the input embedding, and 12 x layers x heads x head size x mean number
    of keys per query for causal attention, where this number is half the sequence length without a
    window. Activation recomputation is not counted.
    """
    windows = [min(window or seq_length, seq_length) for window in config.windows]
    mean_keys = sum(window * (1 - window / (2 * seq_length)) for window in windows)  # of all layers
    attention = 12.0 * config.num_attention_heads * config.head_size * mean_keys
    return 6.0 * outside_embedding + attention
