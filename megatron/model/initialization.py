"""Initial weights, identical in every parallel layout.

Each parameter is drawn at full size from a generator seeded by (seed, layer index, parameter name),
then sliced for the tensor-parallel rank. One process, a pipeline and a tensor-parallel group
therefore start from the same weights, and adding a parameter does not change the others.

The initializers are GPT-NeoX's: `init_method` for embeddings and the projections that read the
residual stream, `output_layer_init_method` for those that write to it. Norms start at one, biases
at zero.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from kerple.positional import outermost
from megatron.model.parallel import full_shape, slice_for_rank
from megatron.model.settings import ModelSettings

Initializer = Callable[[Tensor, torch.Generator], object]

# The projections that write to the residual stream.
RESIDUAL_WRITERS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight", "mlp.w2.weight")


def initializer(name: str, *, std: float, num_layers: int, hidden_size: int) -> Initializer:
    """The initializer called `name` in GPT-NeoX's configuration: it fills a tensor from a
    generator.

    `std` is `init_method_std`. small_init is that of "Transformers without Tears" (sqrt(2 / 5d)),
    wang_init that of Ben Wang's mesh-transformer-jax (2 / (L sqrt(d))). orthogonal has the gain
    sqrt(2), scaled_orthogonal sqrt(2 / L), where L is the number of layers and d the hidden size.
    Raises ValueError for an unknown name.
    """

    def normal(scale: float) -> Initializer:
        return lambda tensor, generator: nn.init.normal_(tensor, 0.0, scale, generator=generator)

    def scaled(fill: Callable[..., Tensor], gain: float = 1.0) -> Initializer:
        return lambda tensor, generator: fill(tensor, gain=gain, generator=generator)

    residual_scale = 1.0 / math.sqrt(2.0 * num_layers)
    initializers: dict[str, Initializer] = {
        "normal": normal(std),
        "scaled_normal": normal(std * residual_scale),
        "single_residual_scaled_normal": normal(std / math.sqrt(num_layers)),
        "orthogonal": scaled(nn.init.orthogonal_, math.sqrt(2.0)),
        "scaled_orthogonal": scaled(nn.init.orthogonal_, math.sqrt(2.0 / num_layers)),
        "xavier_uniform": scaled(nn.init.xavier_uniform_),
        "xavier_normal": scaled(nn.init.xavier_normal_),
        "small_init": normal(math.sqrt(2.0 / (5.0 * hidden_size))),
        "wang_init": normal(2.0 / (num_layers * math.sqrt(hidden_size))),
    }
    if name not in initializers:
        raise ValueError(
            f"initializer {name!r} is unknown; choose one of {', '.join(initializers)}"
        )
    return initializers[name]


def generator_for(seed: int, layer_index: int, name: str) -> torch.Generator:
    """A CPU generator seeded by (seed, layer index, parameter name)."""
    digest = hashlib.sha256(f"{seed}/{layer_index}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


@torch.no_grad()
def initialize(
    layers: Mapping[int, nn.Module],
    settings: ModelSettings,
    *,
    seed: int,
    init_method: str,
    output_init_method: str,
    std: float,
) -> None:
    """Fill the parameters of the given layers in place. The values do not depend on which layers
    are given.

    A positional method fills its own parameters (`reset_parameters`).
    """
    # One initializer for the projections that write to the residual stream, one for the rest.
    config = settings.config
    make = partial(
        initializer, std=std, num_layers=config.num_layers, hidden_size=config.hidden_size
    )
    fill_reader, fill_writer = make(init_method), make(output_init_method)
    for index, layer in layers.items():
        if index == config.num_layers + 4 and not config.no_weight_tying:
            continue  # its weight is the embedding's

        # Positional methods fill their own parameters, which the loop below leaves alone.
        positional_ids: set[int] = set()
        for name, method in outermost(layer):
            # A shared method is part of every block. Its generator does not depend on the block, so
            # that every pipeline stage draws the same values.
            generator = generator_for(seed, index, name)
            if method.shared:
                generator = generator_for(seed, -1, "positional")
            method.reset_parameters(generator)
            positional_ids.update(id(parameter) for parameter in method.parameters())

        # Biases start at 0, norms at 1, and matrices at random.
        for name, parameter in layer.named_parameters():
            if id(parameter) in positional_ids:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                # Draw the full parameter, and keep this tensor-parallel rank's slice of it.
                fill, generator = fill_reader, generator_for(seed, index, name)
                if name.endswith(RESIDUAL_WRITERS):
                    fill = fill_writer
                full = torch.empty(full_shape(parameter, settings.tp.size), dtype=torch.float32)
                fill(full, generator)
                parameter.copy_(slice_for_rank(parameter, full, settings.tp.rank))
