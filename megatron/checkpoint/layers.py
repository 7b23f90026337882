"""Weights on disk: one file per layer and tensor-parallel rank,
`layer_XX-model_YY-model_states.pt`.

This is the layout of DeepSpeed and of the KERPLE release. Models without a pipeline are saved in
the same layout, so the weights in a checkpoint do not depend on the parallel layout of the run.

Layer files of GPT-NeoX and of the KERPLE release differ from those of this project. Both add the
biases of row-parallel layers after the results of the ranks are summed, except with
`gpt_j_residual`: there, every tensor-parallel rank adds its own bias before the sum. GPT-NeoX 2
orders the rows of query_key_value differently if query heads share keys. The parameter of an
RMSNorm is called `scale`.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from kerple.positional import PositionalMethod
from megatron.checkpoint.directory import (
    STATE_FILE,
    layer_file,
    layer_files,
    read_state_file,
    saved_by_this_project,
)
from megatron.checkpoint.storage import CheckpointError, read_weights
from megatron.config.schema.model import ModelConfig
from megatron.model.gpt import GPT, TransformerBlock
from megatron.model.parallel import full_shape, slice_for_rank
from megatron.model.settings import ModelSettings

# Parameters of GPT-NeoX's RMSNorm -> their names in this project.
SCALE_NAMES = {
    "input_layernorm.scale": "input_layernorm.weight",
    "post_attention_layernorm.scale": "post_attention_layernorm.weight",
    "norm.scale": "norm.weight",
}

NORM_PREFIXES = ("input_layernorm.", "post_attention_layernorm.", "norm.")
ROW_PARALLEL_BIASES = ("attention.dense.bias", "mlp.dense_4h_to_h.bias", "mlp.w2.bias")
QUERY_KEY_VALUE = ("attention.query_key_value.weight", "attention.query_key_value.bias")


class Origin:
    """The program that wrote a checkpoint. Its state file is read when a property is used, and then
    only once.
    """

    def __init__(self, step: Path):
        self.step = step

    @functools.cached_property
    def is_this_project(self) -> bool:
        return saved_by_this_project(self.step)

    @functools.cached_property
    def is_grouped_by_kind(self) -> bool:
        """Whether GPT-NeoX wrote the checkpoint, whose ranks have all their queries, then all keys,
        then all values.

        DeepSpeed stores the number of data-parallel ranks; the converters of this project do not.
        Raises CheckpointError if there is no state file.
        """
        saved = read_state_file(self.step)
        if not saved:
            raise CheckpointError(
                f"{self.step / STATE_FILE}: no such file. The model has num_kv_heads, and without "
                "this file the order of its queries, keys and values in the layer files is not "
                "known; copy it from where the checkpoint was saved"
            )
        return "dp_world_size" in saved


def own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer file under this project's names."""
    return {SCALE_NAMES.get(name, name): tensor for name, tensor in state.items()}


def own_layout(
    layer: nn.Module, shards: Sequence[Mapping[str, Tensor]], origin: Origin
) -> Sequence[Mapping[str, Tensor]]:
    """A layer's tensors of all tensor-parallel ranks, with values as this project would have saved
    them.

    layer: of the configured model. Raises CheckpointError if the order of the rows of
        query_key_value is not known.
    """
    queries_per_key, head_size = 1, 0
    summed: tuple[str, ...] = ()
    if isinstance(layer, TransformerBlock):
        queries_per_key, head_size = layer.attention.queries_per_key, layer.attention.head_size
        if layer.parallel_residual:
            summed = ROW_PARALLEL_BIASES
    if (len(shards) == 1 and queries_per_key == 1) or origin.is_this_project:
        return shards

    # The order of the rows of query_key_value.
    converted = [dict(shard) for shard in shards]
    if queries_per_key > 1 and origin.is_grouped_by_kind:
        for shard in converted:
            for name in shard.keys() & set(QUERY_KEY_VALUE):
                shard[name] = group_by_key(shard[name], queries_per_key, head_size)
    if len(shards) == 1:
        return converted

    # Biases that all ranks add, and norms: replicas that rounding may have trained apart.
    for name, first in shards[0].items():
        if name not in summed and not name.startswith(NORM_PREFIXES):
            continue
        if any(name not in shard or shard[name].shape != first.shape for shard in shards):
            continue  # is an error when the shards are merged
        total = torch.stack([shard[name].float() for shard in shards]).sum(0)
        if name not in summed:
            total = total / len(shards)
        for shard in converted:
            shard[name] = total
    return converted


def group_by_key(rows: Tensor, queries_per_key: int, head_size: int) -> Tensor:
    """Reorder the rows `[(h + 2 g) d, ...]` of query_key_value for h query heads and g key heads:
    from all queries, all keys, all values to groups of the queries that share a key, this key, and
    its value.
    """
    groups, rest = divmod(len(rows), (queries_per_key + 2) * head_size)
    if rest:
        return rows  # is an error when sizes are compared
    heads = rows.unflatten(0, (-1, head_size))  # [h + 2 g, d, ...]
    query, key, value = heads.split((groups * queries_per_key, groups, groups))
    query = query.unflatten(0, (groups, queries_per_key))  # [g, h / g, d, ...]
    grouped = torch.cat((query, key.unsqueeze(1), value.unsqueeze(1)), dim=1)
    return grouped.flatten(0, 2)


EMBEDDING, OUTPUT = "word_embeddings.weight", "final_linear.weight"

# Copies of a tensor may differ by this, relative to its largest value: ranks can be trained apart
# by rounding.
COPY_TOLERANCE = 0.01
_NAN = 1e38  # in comparisons of copies

# Command-line names of the dtypes that weights are converted to.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Prefixes of the positional method's parameters: in blocks, and in the embedding.
POSITIONAL_PREFIXES = ("attention.rpe.", "position_embeddings.")

# Buffers that GPT-NeoX saves and this model computes.
COMPUTED_BUFFERS = (
    "attention.rotary_emb.inv_freq",
    "attention.alibi_embed.slopes",
    "position_embeddings.inv_freq",
)

# Layer index -> the tensors in the file of each tensor-parallel rank.
LayerStates = Mapping[int, Sequence[Mapping[str, Tensor]]]


def tied_output(config: ModelConfig) -> int | None:
    """Index of the output layer if it uses the embedding's weights; it then has no file."""
    if config.no_weight_tying:
        return None
    return config.num_layers + 4


def weight_layers(layers: Mapping[int, nn.Module], config: ModelConfig) -> dict[int, nn.Module]:
    """The layers that have files: all but an output layer that uses the embedding's weights."""
    tied = tied_output(config)
    return {index: layer for index, layer in layers.items() if index != tied}


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and persistent buffers, without megatron-core's placeholders."""
    state = layer.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if torch.is_tensor(tensor)}


def layer_state(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and persistent buffers, ready for torch.save, which writes a tensor's
    whole storage.

    A tensor that is contiguous and fills its storage is returned itself, others are copied.
    """
    state = {}
    for name, tensor in tensors_of(layer).items():
        detached = tensor.detach()
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            detached = detached.clone(memory_format=torch.contiguous_format)
        state[name] = detached
    return state


def merge_shards(name: str, shards: Sequence[Tensor], expected: torch.Size, source: Path) -> Tensor:
    """One tensor of the expected shape from the shards of all tensor-parallel ranks.

    Shards of the expected shape are replicas (norms, biases of row-parallel layers, positional
    parameters). Otherwise the shards are concatenated along the one dimension in which their sizes
    add up. Raises CheckpointError, naming both shapes, if neither fits.
    """
    if all(shard.shape == expected for shard in shards):
        return shards[0]
    if len(shards) > 1 and all(shard.dim() == len(expected) for shard in shards):
        for dim in range(len(expected)):
            rest = (*expected[:dim], *expected[dim + 1 :])
            fits = all((*shard.shape[:dim], *shard.shape[dim + 1 :]) == rest for shard in shards)
            if fits and sum(shard.shape[dim] for shard in shards) == expected[dim]:
                return torch.cat(list(shards), dim)
    shapes = " + ".join(str(tuple(shard.shape)) for shard in shards)
    raise CheckpointError(
        f"{source}: {name} has shape {shapes} in the checkpoint and {tuple(expected)} in the "
        "configured model; the configuration describes a model of a different size"
    )


def check_copies(copies: Sequence[Tensor], problem: str) -> None:
    """Raises CheckpointError, saying `problem`, if copies differ by more than rounding."""
    if copies[0].is_meta:
        return
    # NaN becomes a number, so that it equals NaN and differs from other values.
    first, *others = (tensor.float().nan_to_num(_NAN) for tensor in copies)
    for other in others:
        difference = (first - other).abs().max()
        largest = torch.stack((first, other)).abs().max()
        if difference > COPY_TOLERANCE * largest:
            raise CheckpointError(f"{problem} (largest difference: {difference:.2g})")


def open_layers(
    step: Path, indices: Iterable[int] | None = None
) -> dict[int, list[dict[str, Tensor]]]:
    """Open the files of all layers, or of `indices`, with this project's names. The tensors are
    memory-mapped: do not write to them.
    """
    files = layer_files(step)
    if indices is None:
        indices = files
    states: dict[int, list[dict[str, Tensor]]] = {}
    for index in indices:
        if index in files:
            states[index] = [own_names(read_weights(path)) for path in files[index]]
    return states


def load_layers(
    layers: Mapping[int, nn.Module],
    step: Path,
    *,
    states: LayerStates | None = None,
    tensor_size: int = 1,
    tensor_rank: int = 0,
    positional: bool = True,
) -> None:
    """Fill the layers in place from a checkpoint of any tensor-parallel size.

    states: the opened files, from `open_layers`; by default they are opened here. positional: False
    neither reads nor changes the tensors of positional methods. Raises CheckpointError, before a
    layer is changed, if its names or shapes do not match.
    """
    if states is None:
        states = open_layers(step, layers)
    origin = Origin(step)
    for index, layer in layers.items():
        full = _merge_layer(index, layer, states, origin, tensor_size, positional)
        with torch.no_grad():
            for name, tensor in tensors_of(layer).items():
                if name in full:
                    tensor.copy_(slice_for_rank(tensor, full[name], tensor_rank))


def check_sizes(
    step: Path,
    settings: ModelSettings,
    states: LayerStates | None = None,
    *,
    positional: bool = True,
) -> None:
    """Compare names, shapes and number of all tensors in a checkpoint with a model of these
    settings, on one rank, and the copies of what its layers share.

    Reads no other weights. states: the opened files, from `open_layers`. positional: False leaves
    out the tensors of positional methods. Raises CheckpointError, naming both sides of a
    difference.
    """
    files = states
    if files is None:
        files = open_layers(step)
    shapes: dict[int, list[dict[str, Tensor]]] = {}
    for index, shards in files.items():
        shapes[index] = []
        for shard in shards:
            shapes[index].append({name: tensor.to("meta") for name, tensor in shard.items()})
    config = settings.config
    check_dimensions(shapes, config, step)

    # Names and shapes.
    with torch.device("meta"):
        layers = weight_layers(GPT(settings).layers(), config)
    origin = Origin(step)
    for index, layer in layers.items():
        _merge_layer(index, layer, shapes, origin, tensor_size=1, positional=positional)

    # Copies.
    output = tied_output(config)
    if output is not None and output in files:
        _check_tied_output(files[0], files[output], layer_file(step, output, 0))
    if positional:
        _check_shared_method(layers, files, config.pos_emb, step)


def check_dimensions(states: LayerStates, config: ModelConfig, step: Path) -> None:
    """Compare the number of layers and the hidden size with the checkpoint's, before the model is
    built. Raises CheckpointError, naming both sides of a difference.
    """
    # A checkpoint may contain the output layer even if the model uses the embedding's weights for
    # it.
    output = last = config.num_layers + 4
    if not config.no_weight_tying:
        last = output - 1
    if max(states) not in (last, output):
        raise CheckpointError(
            f"{step}: the last layer file has index {max(states)}, but the configured model would "
            f"have {last}; num-layers (or no-weight-tying) differs"
        )
    for index in (0, *range(2, config.num_layers + 2), config.num_layers + 3):
        if index not in states:
            raise CheckpointError(
                f"{layer_file(step, index, 0)}: no such file; num-layers differs, or the "
                "checkpoint is incomplete"
            )

    # The embedding.
    expected = torch.Size((embedding_rows(states, step), config.hidden_size))
    shards = [shard[EMBEDDING].to("meta") for shard in states[0]]
    merge_shards(EMBEDDING, shards, expected, layer_file(step, 0, 0))


def embedding_rows(states: LayerStates, step: Path) -> int:
    """The padded vocabulary size: rows of the word embedding over all tensor-parallel ranks."""
    for rank, shard in enumerate(states.get(0, [{}])):
        if EMBEDDING not in shard or shard[EMBEDDING].dim() != 2:
            raise CheckpointError(f"{layer_file(step, 0, rank)}: lacks the matrix {EMBEDDING}")
    return sum(shard[EMBEDDING].shape[0] for shard in states[0])


def _check_tied_output(
    embedding: Sequence[Mapping[str, Tensor]], output: Sequence[Mapping[str, Tensor]], source: Path
) -> None:
    """Raises CheckpointError if the file of an output layer, which the configured model does not
    have, contains other weights than the embedding.
    """
    expected = torch.cat([shard[EMBEDDING] for shard in embedding])
    shards = [shard[name] for shard in output for name in (OUTPUT, EMBEDDING) if name in shard]
    if shards:
        weight = merge_shards(OUTPUT, shards, expected.shape, source)
        if torch.equal(weight.to(expected.dtype), expected):
            return
    raise CheckpointError(
        f"{source}: contains an output layer with other weights than the embedding, but the "
        'configured model uses the embedding\'s; set "no-weight-tying": true'
    )


def _check_shared_method(
    layers: Mapping[int, nn.Module], files: LayerStates, pos_emb: str, step: Path
) -> None:
    """Raises CheckpointError if layers that share a positional method have different parameters."""
    first: dict[str, Tensor] = {}
    for index, layer in layers.items():
        if not isinstance(layer, TransformerBlock):
            continue
        method = layer.attention.rpe
        if method is None or not method.shared:
            continue
        per_layer = f'"pos_emb": "per_layer", "pos_emb_options": {{"methods": ["{pos_emb}"]}}'
        if "parameters" in method.default_options():
            per_layer = '"pos_emb_options": {"parameters": "per-layer"}'
        source = layer_file(step, index, 0)
        for name, parameter in method.named_parameters(prefix="attention.rpe"):
            shards = [shard[name] for shard in files[index]]
            copy = merge_shards(name, shards, parameter.shape, source)
            check_copies(
                (first.setdefault(name, copy), copy),
                f"{source}: {name} differs from that of the first layer, but the layers of the "
                f"configured model share it. If each layer has its own, set {per_layer}",
            )


def _merge_layer(
    index: int,
    layer: nn.Module,
    states: LayerStates,
    origin: Origin,
    tensor_size: int,
    positional: bool,
) -> dict[str, Tensor]:
    """The layer's unsliced tensors. Raises CheckpointError if names or shapes do not fit."""
    # Without its positional tensors, a layer may have none.
    left_out: tuple[str, ...] = ()
    if not positional:
        left_out = POSITIONAL_PREFIXES
    expected = {}
    for name, tensor in tensors_of(layer).items():
        if not name.startswith(left_out):
            expected[name] = full_shape(tensor, tensor_size)
    if not expected:
        return {}
    if index not in states:
        raise CheckpointError(
            f"{origin.step}: has no file for layer {index} of the configured model; num-layers "
            "differs"
        )

    # Names. Tensors that the module computes may be in the file, but are not needed.
    shards, source = own_layout(layer, states[index], origin), layer_file(origin.step, index, 0)
    known = {*expected, *COMPUTED_BUFFERS}
    for prefix, module in layer.named_modules():
        if isinstance(module, PositionalMethod):
            known |= {f"{prefix}.{name}" for name in module.computed}
    parts = []
    if missing := [name for name in expected if name not in shards[0]]:
        parts.append(f"lacks {', '.join(missing)}, which the configured model has")
    in_file = [name for name in shards[0] if not name.startswith(left_out)]
    if unknown := [name for name in in_file if name not in known]:
        parts.append(f"contains {', '.join(unknown)}, which the configured model does not have")
    if parts:
        raise CheckpointError(
            f"{source}: {' and '.join(parts)}; check pos-emb and the keys that set the model's "
            "shape"
        )

    # Shapes, and equal copies on all ranks.
    full = {}
    for name, shape in expected.items():
        if not all(name in shard for shard in shards):
            raise CheckpointError(
                f"{source}: another tensor-parallel rank's file of this layer lacks {name}"
            )
        copies = [shard[name] for shard in shards]
        full[name] = merge_shards(name, copies, shape, source)
        if copies[0].shape == shape:
            check_copies(
                copies,
                f"{source}: {name} differs from that of another tensor-parallel rank, but each has "
                "a copy of all of it. The files are of different checkpoints, or damaged; copy "
                "them again",
            )
    return full
