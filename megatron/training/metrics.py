"""Counts and rates: parameters, floating-point operations, memory."""

import re
import resource

import torch
import torch.distributed as dist
from torch import nn

from megatron.model.gpt import positional_methods
from megatron.model.settings import ModelSettings

# Dense bf16 matrix peak in FLOP/s, from the vendors' data sheets. The longest name that stands whole in the device's
# name counts.
PEAK_FLOPS = {
    "A100": 312e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
}


def device_peak(device: torch.device) -> float | None:
    """Dense bf16 peak of the device in FLOP/s, or None where it is not known (a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in PEAK_FLOPS if re.search(rf"(?<!\w){key}(?!\w)", name)]
    return PEAK_FLOPS[max(matches, key=len)] if matches else None


def count_parameters(layers: dict[int, nn.Module], settings: ModelSettings, layout=None) -> dict[str, int]:
    """Parameters of the whole model, each counted once however many ranks hold a copy.

    total: all of them. positional: those of the positional methods. outside_embedding: all but the input embedding's,
    which is what counts for floating-point operations. `layout` (training's) is given where the model is spread over
    ranks.
    """
    owned = {id(p): p.numel() for method in positional_methods(layers).values() for p in method.parameters()}
    counts = {"total": 0, "positional": 0, "embedding": 0}
    seen: set[int] = set()
    for index, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if id(parameter) in seen or getattr(parameter, "ds_pipe_replicated", False):
                continue
            seen.add(id(parameter))
            numel = getattr(parameter, "ds_numel", parameter.numel())
            if getattr(parameter, "tensor_model_parallel", False):
                numel *= settings.tp.size
            counts["total"] += numel
            if id(parameter) in owned:
                counts["positional"] += numel
            elif index == 0 and name.startswith("word_embeddings"):
                counts["embedding"] += numel
    if layout is not None and layout.pipeline_size > 1:
        from megatron.core import parallel_state

        values = torch.tensor(list(counts.values()), device=layout.device)
        dist.all_reduce(values, group=parallel_state.get_pipeline_model_parallel_group())
        counts = dict(zip(counts, values.tolist(), strict=True))
    outside = counts["total"] - (0 if settings.tied_embeddings else counts.pop("embedding"))
    return {"total": counts["total"], "positional": counts["positional"], "outside_embedding": outside}


def flops_per_token(outside_embedding: int, settings: ModelSettings, length: int) -> float:
    """6 per parameter outside the input embedding, and 6 x layers x hidden x length for causal attention;
    recomputation is not counted.
    """
    return 6.0 * outside_embedding + 6.0 * settings.num_layers * settings.hidden_size * length


def peak_memory(device: torch.device) -> int:
    """Highest memory so far in bytes: allocated on the GPU, or resident of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def kernel_statistics(layers: dict[int, nn.Module]) -> dict[str, torch.Tensor]:
    """Name -> values per head of every positional parameter on this rank, as used; per-layer methods carry their
    layer index in the name.
    """
    found: dict[str, torch.Tensor] = {}
    for index, method in positional_methods(layers).items():
        for name, values in method.statistics().items():
            found[name if method.shared else f"layer_{index:02d}/{name}"] = values.detach().float().cpu()
    return found
