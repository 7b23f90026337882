"""Weights on disk: one file per layer and tensor-parallel rank, `layer_XX-model_YY-model_states.pt`.

This is the layout of DeepSpeed's pipeline and of the KERPLE release; a plain sequence of layers is saved in the same
way, so that a checkpoint's weights do not depend on how the run was laid out.
"""

import re
from collections.abc import Container
from pathlib import Path

import torch
from torch import Tensor, nn

from kerple.positional import PositionalMethod
from megatron.checkpoint.storage import CheckpointError, load_tensors

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")

# Buffers that older checkpoints hold and this model computes.
COMPUTED_BUFFERS = (
    "attention.rotary_emb.inv_freq",
    "attention.alibi_embed.slopes",
    "position_embeddings.inv_freq",
)


def layer_file(directory: Path, index: int, tensor_rank: int) -> Path:
    return directory / f"layer_{index:02d}-model_{tensor_rank:02d}-model_states.pt"


def layer_files(directory: Path) -> dict[int, list[Path]]:
    """Layer index -> its files in order of tensor-parallel rank. Raises CheckpointError where a rank's file is
    missing.
    """
    found: dict[int, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = LAYER_FILE.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if not found:
        raise CheckpointError(f"{directory}: holds no layer_XX-model_YY-model_states.pt, so it is not a checkpoint")
    ranks = max(len(files) for files in found.values())
    for index, files in found.items():
        for rank in range(ranks):
            if rank not in files:
                raise CheckpointError(f"{layer_file(directory, index, rank)}: missing; the checkpoint is not whole")
    return {index: [files[rank] for rank in range(ranks)] for index, files in sorted(found.items())}


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and persistent buffers; megatron-core's layers put a place-holder beside them."""
    return {name: tensor for name, tensor in layer.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)}


def layer_state(layer: nn.Module) -> dict[str, Tensor]:
    """The layer's parameters and persistent buffers, for saving: each the only one in its storage, which is what
    torch.save writes. They are the live tensors where these are so already.
    """
    return {name: _alone(tensor.detach()) for name, tensor in tensors_of(layer).items()}


def _alone(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def merge_shards(name: str, shards: list[Tensor], expected: torch.Size, where: Path) -> Tensor:
    """One tensor of the expected shape from the tensor-parallel ranks' pieces.

    A piece of the expected shape is a replica (norms, biases of row-parallel layers, our positional parameters);
    otherwise the pieces are joined along the one dimension in which their sizes add up. Raises CheckpointError that
    names both shapes when neither fits.
    """
    if all(shard.shape == expected for shard in shards):
        return shards[0]
    if len(shards) > 1 and all(shard.dim() == len(expected) for shard in shards):
        for dim in range(len(expected)):
            others = [size for axis, size in enumerate(expected) if axis != dim]
            fits = all([size for axis, size in enumerate(shard.shape) if axis != dim] == others for shard in shards)
            if fits and sum(shard.shape[dim] for shard in shards) == expected[dim]:
                return torch.cat(shards, dim)
    shapes = " + ".join(str(tuple(shard.shape)) for shard in shards)
    raise CheckpointError(
        f"{where}: {name} has shape {shapes} in the checkpoint and {tuple(expected)} in the configured model; "
        "the configuration is of another model size"
    )


def computed_names(layer: nn.Module) -> set[str]:
    """Names that a checkpoint may hold and this layer computes."""
    methods = ((name, module) for name, module in layer.named_modules() if isinstance(module, PositionalMethod))
    return {*COMPUTED_BUFFERS, *(f"{name}.{tensor}" for name, method in methods for tensor in method.computed)}


def read_layer(
    files: list[Path], expected: dict[str, torch.Size], computed: Container[str] = (), *, shapes_only: bool = False
) -> dict[str, Tensor]:
    """The whole (unsliced) state of one layer, to be read only. `expected` holds the shapes in the model, unsliced;
    tensors named in `computed` are left alone. shapes_only: the tensors have no data, and none is read.

    Raises CheckpointError for a tensor that the model lacks or the file lacks, or of another shape.
    """
    shards = [load_layer_file(path) for path in files]
    if shapes_only:
        shards = [{name: tensor.to("meta") for name, tensor in shard.items()} for shard in shards]
    where = files[0]
    extra = [name for name in shards[0] if name not in expected and name not in computed]
    missing = [name for name in expected if name not in shards[0]]
    if extra or missing:
        parts = []
        if missing:
            parts.append(f"lacks {', '.join(missing)}, which the configured model has")
        if extra:
            parts.append(f"holds {', '.join(extra)}, which the configured model has not")
        raise CheckpointError(f"{where}: {' and '.join(parts)}; check pos-emb and the other keys of the model's shape")
    return {
        name: merge_shards(name, [shard[name] for shard in shards], shape, where) for name, shape in expected.items()
    }


def load_layer_file(path: Path) -> dict[str, Tensor]:
    """Name -> tensor, mapped. Raises CheckpointError for a file that holds anything else."""
    state = load_tensors(path, mapped=True)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__} instead of named tensors")
    for name, value in state.items():
        if not torch.is_tensor(value):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
    return state


def full_shapes(layer: nn.Module, tensor_size: int) -> dict[str, torch.Size]:
    """Shapes of the layer's tensors before tensor-parallel slicing."""
    shapes: dict[str, torch.Size] = {}
    for name, tensor in tensors_of(layer).items():
        shape = list(getattr(tensor, "ds_shape", tensor.shape))
        if getattr(tensor, "tensor_model_parallel", False):
            shape[tensor.partition_dim] *= tensor_size
        shapes[name] = torch.Size(shape)
    return shapes


def slice_for_rank(layer: nn.Module, state: dict[str, Tensor], tensor_rank: int) -> dict[str, Tensor]:
    """This tensor-parallel rank's piece of every tensor of an unsliced state."""
    pieces = {}
    for name, tensor in tensors_of(layer).items():
        whole = state[name]
        if getattr(tensor, "tensor_model_parallel", False):
            size = tensor.shape[tensor.partition_dim]
            whole = whole.narrow(tensor.partition_dim, tensor_rank * size, size)
        pieces[name] = whole
    return pieces


def load_layers(layers: dict[int, nn.Module], directory: Path, *, tensor_size: int = 1, tensor_rank: int = 0) -> None:
    """Fill the given layers in place from a checkpoint of any tensor-parallel size. Raises CheckpointError before a
    layer is changed.
    """
    for index, layer in layers.items():
        state = _read_whole(index, layer, layer_files(directory), directory, tensor_size)
        pieces = slice_for_rank(layer, state, tensor_rank)
        with torch.no_grad():
            for name, tensor in tensors_of(layer).items():
                tensor.copy_(pieces[name])


def check_layers(layers: dict[int, nn.Module], directory: Path, *, tied: bool) -> None:
    """Compare the files' names, shapes and number with those of a whole model, which may be on the meta device: no
    weights are read. tied: the output layer, which uses the embedding's weights, is not among `layers`, and a file of
    it is passed over. Raises CheckpointError that names both sides of a difference.
    """
    files = layer_files(directory)
    last = max(layers)
    if max(files) not in (last, last + tied):
        raise CheckpointError(
            f"{directory}: its last layer file has index {max(files)}, that of the configured model would have {last}; "
            "num-layers (or no-weight-tying) differs"
        )
    for index, layer in layers.items():
        _read_whole(index, layer, files, directory, 1, shapes_only=True)


def read_tensor(directory: Path, index: int, name: str, expected: torch.Size) -> Tensor:
    """One unsliced tensor of one layer, to be read only."""
    files = layer_files(directory)[index]
    return merge_shards(name, [load_tensors(path, mapped=True)[name] for path in files], expected, files[0])


def _read_whole(
    index: int,
    layer: nn.Module,
    files: dict[int, list[Path]],
    directory: Path,
    tensor_size: int,
    *,
    shapes_only: bool = False,
) -> dict[str, Tensor]:
    shapes = full_shapes(layer, tensor_size)
    if not shapes:
        return {}
    if index not in files:
        raise CheckpointError(
            f"{directory}: has no file of layer {index}, which the configured model has; num-layers differs"
        )
    return read_layer(files[index], shapes, computed_names(layer), shapes_only=shapes_only)
