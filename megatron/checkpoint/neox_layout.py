"""Layer files of GPT-NeoX and of the KERPLE release, where they differ from those of this project.

Both add the biases of row-parallel layers after the ranks' results are summed, except with `gpt_j_residual`: there,
every tensor-parallel rank adds its own bias before the sum. GPT-NeoX 2 orders the rows of query_key_value differently
if query heads share keys. The parameter of an RMSNorm is called `scale`.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.checkpoint.directory import STATE_FILE, read_state_file, saved_by_this_project
from megatron.checkpoint.storage import CheckpointError
from megatron.model.gpt import TransformerBlock

# Parameters of GPT-NeoX's RMSNorm -> their names in this project.
SCALE_NAMES = {f"{norm}.scale": f"{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm", "norm")}

NORM_PREFIXES = ("input_layernorm.", "post_attention_layernorm.", "norm.")
ROW_PARALLEL_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias", "mlp.w2.bias")
QUERY_KEY_VALUE = ("attention.query_key_value.weight", "attention.query_key_value.bias")


class Origin:
    """The program that wrote a checkpoint. Its state file is read when a property is used, and then only once."""

    def __init__(self, step: Path):
        self.step = step

    @functools.cached_property
    def is_this_project(self) -> bool:
        return saved_by_this_project(self.step)

    @functools.cached_property
    def is_grouped_by_kind(self) -> bool:
        """Whether GPT-NeoX wrote the checkpoint, whose ranks have all their queries, then all keys, then all values.

        DeepSpeed stores the number of data-parallel ranks; the converters of this project do not. Raises
        CheckpointError if there is no state file.
        """
        saved = read_state_file(self.step)
        if not saved:
            raise CheckpointError(
                f"{self.step / STATE_FILE}: no such file. The model has num_kv_heads, and without this file the order "
                "of its queries, keys and values in the layer files is not known; copy it from where the checkpoint "
                "was saved"
            )
        return "dp_world_size" in saved


def own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer file under this project's names."""
    return {SCALE_NAMES.get(name, name): tensor for name, tensor in state.items()}


def own_layout(
    layer: nn.Module, shards: Sequence[Mapping[str, Tensor]], origin: Origin
) -> Sequence[Mapping[str, Tensor]]:
    """A layer's tensors of all tensor-parallel ranks, with values as this project would have saved them.

    layer: of the configured model. Raises CheckpointError if the order of the rows of query_key_value is not known.
    """
    shares_keys = isinstance(layer, TransformerBlock) and layer.attention.queries_per_key > 1
    if (len(shards) == 1 and not shares_keys) or origin.is_this_project:
        return shards
    converted = [dict(shard) for shard in shards]
    if isinstance(layer, TransformerBlock) and shares_keys and origin.is_grouped_by_kind:
        for shard in converted:
            for name in shard.keys() & set(QUERY_KEY_VALUE):
                shard[name] = group_by_key(shard[name], layer.attention.queries_per_key, layer.attention.head_size)
    if len(shards) == 1:
        return converted
    summed = ROW_PARALLEL_BIASES if isinstance(layer, TransformerBlock) and layer.parallel_residual else ()
    for name, first in shards[0].items():
        # The ranks' norms are replicas, but they may have been trained apart by rounding.
        if name not in summed and not name.startswith(NORM_PREFIXES):
            continue
        if any(name not in shard or shard[name].shape != first.shape for shard in shards):
            continue  # is an error when the shards are merged
        total = torch.stack([shard[name].float() for shard in shards]).sum(0)
        for shard in converted:
            shard[name] = total if name in summed else total / len(shards)
    return converted


def group_by_key(rows: Tensor, queries_per_key: int, head_size: int) -> Tensor:
    """Reorder the rows `[(h + 2 g) d, ...]` of query_key_value for h query heads and g key heads: from all queries, all
    keys, all values to groups of the queries that share a key, this key, and its value.
    """
    groups, rest = divmod(len(rows), (queries_per_key + 2) * head_size)
    if rest:
        return rows  # is an error when sizes are compared
    heads = rows.unflatten(0, (-1, head_size))
    query, key, value = heads.split((groups * queries_per_key, groups, groups))
    query = query.unflatten(0, (groups, queries_per_key))
    return torch.cat((query, key.unsqueeze(1), value.unsqueeze(1)), dim=1).flatten(0, 2)
