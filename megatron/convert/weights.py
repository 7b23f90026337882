"""Tensor names in our layer files (which are GPT-NeoX's) and in Hugging Face's GPT-NeoX, and
reading their files.

The values are identical: both keep the rows of query_key_value grouped by head, `[heads, 3, d]`.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.layers import (
    COMPUTED_BUFFERS,
    POSITIONAL_PREFIXES,
    open_layers,
    tensors_of,
    weight_layers,
)
from megatron.checkpoint.storage import CheckpointError, read_json, read_weights
from megatron.convert import llama
from megatron.model.gpt import GPT

# Names outside the blocks. A tensor of a block keeps its name after `BLOCK`; Hugging Face counts
# blocks from 0.
OUTER_NAMES = {
    "word_embeddings.weight": "gpt_neox.embed_in.weight",
    "norm.weight": "gpt_neox.final_layer_norm.weight",
    "norm.bias": "gpt_neox.final_layer_norm.bias",
    "final_linear.weight": "embed_out.weight",
}
BLOCK = "gpt_neox.layers.{block}."

# Prefixes of the positional method's parameters, which only self-contained models have: one method
# for all layers, or one per layer.
SHARED_POSITIONAL, LAYER_POSITIONAL = "gpt_neox.positional.", f"{BLOCK}attention.positional."

# Other names of the same tensors in some files, and tensors that are computed.
SYNONYMS = {"lm_head.weight": "embed_out.weight"}
COMPUTED = re.compile(
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    r"|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
)

SAFETENSORS, PYTORCH_BIN = "model.safetensors", "pytorch_model.bin"


def hugging_face_names(model: GPT) -> dict[tuple[int, str], str]:
    """(layer index, our name) -> Hugging Face's name, for all tensors of the model except tied
    output weights.
    """
    prefixes = positional_prefixes(model)
    names = {}
    for index, layer in layers_with_weights(model).items():
        for name in tensors_of(layer):
            prefix = next(
                (prefix for prefix in POSITIONAL_PREFIXES if name.startswith(prefix)), None
            )
            if prefix is not None:
                names[index, name] = prefixes.get(index, SHARED_POSITIONAL) + name.removeprefix(
                    prefix
                )
            else:
                names[index, name] = OUTER_NAMES.get(name) or BLOCK.format(block=index - 2) + name
    return names


def positional_prefixes(model: GPT) -> dict[int, str]:
    """Layer index -> prefix of its positional method's names; one entry if they share it."""
    methods = model.positional_methods()
    if all(method.shared or "embed" in method.hooks for method in methods.values()):
        return dict.fromkeys(methods, SHARED_POSITIONAL)
    return {index: LAYER_POSITIONAL.format(block=index - 2) for index in methods}


def layers_with_weights(model: GPT) -> dict[int, nn.Module]:
    return weight_layers(model.layers(), model.settings.config)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy on the CPU, in `dtype`."""
    return tensor.detach().to(dtype=dtype, device="cpu", copy=True).contiguous()


def check_finite(tensors: Mapping[str, Tensor], place: object) -> None:
    """Raises CheckpointError, starting with `place`, if a tensor that is about to be written has
    values that are not finite: those of the model, or those that its dtype cannot represent.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{place}: nothing was written, because {name} has values that are NaN or infinite "
                f"in {tensor.dtype}; choose a dtype of larger range (--dtype bf16 or fp32), or, if "
                "the model itself has them, another checkpoint (--iteration N)"
            )


def common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of the tensors, or float32 if they have several."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        return torch.float32
    return dtypes.pop()


def saved_dtype(step: Path) -> torch.dtype:
    """`common_dtype` of a checkpoint's layer files."""
    tensors = []
    for shards in open_layers(step).values():
        for shard in shards:
            tensors += [shard[name] for name in shard if name not in COMPUTED_BUFFERS]
    return common_dtype(tensors)


def hugging_face_tensors(
    model: GPT, dtype: torch.dtype, model_type: str = "gpt_neox"
) -> dict[str, Tensor]:
    """The model's tensors in `dtype`, under the names of a model_type of transformers."""
    tensors = {name: cast(tensor, dtype) for name, tensor in _named_tensors(model).items()}
    if model_type in llama.ARCHITECTURES:
        return llama.split_tensors(tensors, model.settings.config)
    return tensors


def _named_tensors(model: GPT) -> dict[str, Tensor]:
    """The model's tensors under the names of GPT-NeoX models in transformers."""
    tensors = {index: tensors_of(layer) for index, layer in layers_with_weights(model).items()}
    names = hugging_face_names(model).items()
    return {theirs: tensors[index][ours] for (index, ours), theirs in names}


def read_hugging_face(folder: Path, model_type: str = "gpt_neox") -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder except computed ones. Reads one file or several with an
    index, preferring safetensors over `pytorch_model.bin`, from which only tensors are loaded.

    Raises CheckpointError if there are no weights, a file is missing or damaged, or contains
    anything but tensors.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        content = read_weights(path, ignored=COMPUTED)
        if model_type not in llama.ARCHITECTURES:
            content = {SYNONYMS.get(name, name): tensor for name, tensor in content.items()}
        tensors |= content
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    for name in (SAFETENSORS, PYTORCH_BIN):
        if os.path.lexists(folder / name):
            return [folder / name]
        index = folder / f"{name}.index.json"
        if os.path.lexists(index):
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(
                    f"{index}: weight_map is missing, or does not map names of tensors to files"
                )
            for part in weight_map.values():
                if not isinstance(part, str) or Path(part).name != part:
                    raise CheckpointError(
                        f"{index}: names {part!r}, which is not a file in this folder"
                    )
            return [folder / part for part in sorted(set(weight_map.values()))]
    raise CheckpointError(
        f"{folder}: has neither {SAFETENSORS} nor {PYTORCH_BIN}, so there are no weights to convert"
    )


def check_tensors(
    model: GPT, tensors: dict[str, Tensor], source: Path, model_type: str = "gpt_neox"
) -> None:
    """Compare tensors under the names of a model_type with those of a model on the meta device.
    Raises CheckpointError, naming `source`, for a tensor that is missing, unknown, not finite, or
    has another shape, and for output weights that differ from the embedding to which they are tied.
    """
    # What the model has.
    is_tied, expected = not model.settings.config.no_weight_tying, _named_tensors(model)
    output, embedding = OUTER_NAMES["final_linear.weight"], OUTER_NAMES["word_embeddings.weight"]
    if model_type in llama.ARCHITECTURES:
        expected = llama.split_tensors(expected, model.settings.config)
        output, embedding = llama.TOP_NAMES[output], llama.TOP_NAMES[embedding]

    # Names.
    known, parts = {*expected}, []
    if is_tied:
        known.add(output)
    if missing := [name for name in expected if name not in tensors]:
        parts.append(f"lacks {_shortened(missing)}")
    if unknown := [name for name in tensors if name not in known]:
        parts.append(
            f"contains {_shortened(unknown)}, which the model in config.json does not have"
        )
    if parts:
        raise CheckpointError(f"{source}: {' and '.join(parts)}")

    # Shapes and values.
    for theirs, target in expected.items():
        value = tensors[theirs]
        if target.shape != value.shape:
            raise CheckpointError(
                f"{source}: {theirs} has shape {tuple(value.shape)}, but config.json implies "
                f"{tuple(target.shape)}"
            )
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{source}: {theirs} contains values that are not finite (NaN or infinite)"
            )
    if is_tied and output in tensors and not torch.equal(tensors[embedding], tensors[output]):
        raise CheckpointError(
            f"{source}: {output} differs from {embedding}, but tie_word_embeddings is true; set it "
            "to false in config.json if the model has both"
        )


@torch.no_grad()
def fill(model: GPT, tensors: dict[str, Tensor], model_type: str = "gpt_neox") -> None:
    """Copy tensors that `check_tensors` has accepted into the model."""
    if model_type in llama.ARCHITECTURES:
        tensors = llama.merge_tensors(tensors, model.settings.config)
    for name, tensor in _named_tensors(model).items():
        tensor.copy_(tensors[name])


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    if len(names) > 3:
        shown += f" and {len(names) - 3} more"
    return shown
