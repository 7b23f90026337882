"""Initial weights, the same in every parallel layout.

Each parameter is drawn at full size from a generator seeded by (seed, layer index, parameter name), then sliced for
the tensor-parallel rank that holds it. So one process, a pipeline and a tensor-parallel group start from the same
model, and adding a parameter moves no other.

The methods are GPT-NeoX's: `init_method` for embeddings and the projections that read the residual stream,
`output_layer_init_method` for those that write to it; norms start at one, biases at zero.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Initializer = Callable[[Tensor, torch.Generator], None]

# The projections that write to the residual stream.
RESIDUAL_WRITERS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def _normal(std: float) -> Initializer:
    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        nn.init.normal_(tensor, 0.0, std, generator=generator)

    return fill


def _scaled(fill: Callable[..., Tensor], gain: float) -> Initializer:
    def run(tensor: Tensor, generator: torch.Generator) -> None:
        fill(tensor, gain=gain, generator=generator)

    return run


def initializer(name: str, *, std: float, num_layers: int, hidden_size: int) -> Initializer:
    """The initialization called `name` in GPT-NeoX's configuration.

    `std` is `init_method_std`. small_init is that of "Transformers without Tears" (sqrt(2 / 5d)), wang_init that of
    Ben Wang's mesh-transformer-jax (2 / (L sqrt(d))). Raises ValueError for a name that is none of these.
    """
    residual_scale = 1.0 / math.sqrt(2.0 * num_layers)
    methods: dict[str, Initializer] = {
        "normal": _normal(std),
        "scaled_normal": _normal(std * residual_scale),
        "single_residual_scaled_normal": _normal(std / math.sqrt(num_layers)),
        "orthogonal": _scaled(nn.init.orthogonal_, 1.0),
        "scaled_orthogonal": _scaled(nn.init.orthogonal_, residual_scale),
        "xavier_uniform": _scaled(nn.init.xavier_uniform_, 1.0),
        "xavier_normal": _scaled(nn.init.xavier_normal_, 1.0),
        "small_init": _normal(math.sqrt(2.0 / (5.0 * hidden_size))),
        "wang_init": _normal(2.0 / (num_layers * math.sqrt(hidden_size))),
    }
    if name not in methods:
        raise ValueError(f"initialization {name!r} is not known; choose one of {', '.join(methods)}")
    return methods[name]


def generator_for(seed: int, layer_index: int, name: str) -> torch.Generator:
    """A CPU generator that depends on (seed, layer, parameter) alone."""
    digest = hashlib.sha256(f"{seed}/{layer_index}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


@torch.no_grad()
def initialize_layer(
    layer: nn.Module,
    layer_index: int,
    *,
    seed: int,
    reader: Initializer,
    writer: Initializer,
    tensor_parallel_rank: int = 0,
) -> None:
    """Fill every parameter of one pipeline layer in place.

    Parameters owned by a positional method are filled by the method itself (`reset_parameters`).
    """
    from kerple.positional import outermost

    owned: set[int] = set()
    for name, method in outermost(layer):
        # One shared instance sits in every block: it is drawn once, whatever block asks.
        index = -1 if method.shared else layer_index
        method.reset_parameters(generator_for(seed, index, "positional" if method.shared else name))
        owned.update(id(parameter) for parameter in method.parameters())

    for name, parameter in layer.named_parameters():
        if id(parameter) in owned:
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            fill = writer if name.endswith(RESIDUAL_WRITERS) else reader
            _fill_slice(parameter, fill, generator_for(seed, layer_index, name), tensor_parallel_rank)


def _fill_slice(parameter: Tensor, fill: Initializer, generator: torch.Generator, rank: int) -> None:
    dim = getattr(parameter, "partition_dim", -1)
    if not getattr(parameter, "tensor_model_parallel", False) or dim < 0:
        full = torch.empty(parameter.shape, dtype=torch.float32)
        fill(full, generator)
        parameter.copy_(full)
        return
    from megatron.core import parallel_state

    part = parameter.shape[dim]
    shape = list(parameter.shape)
    shape[dim] = part * parallel_state.get_tensor_model_parallel_world_size()
    full = torch.empty(shape, dtype=torch.float32)
    fill(full, generator)
    parameter.copy_(full.narrow(dim, rank * part, part))
