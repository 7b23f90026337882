"""The GPT model: one list of layers, run as a plain sequence here and by DeepSpeed's pipeline in `pipeline.py`.

Layer indices are GPT-NeoX's: 0 embedding, 1 a function, 2 ... L+1 blocks, L+2 a function, L+3 final norm, L+4 output.

Legend: b batch, s tokens, e hidden size, v padded vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kerple.attention import FULL, Span
from kerple.positional import PositionalMethod, build, outermost
from megatron.model.block import PositionTables, TransformerBlock
from megatron.model.cache import KVCache
from megatron.model.embedding import Embedding
from megatron.model.initialization import initialize_layer, initializer
from megatron.model.output import FinalNorm, Output
from megatron.model.parallel import gather_vocabulary
from megatron.model.settings import ModelSettings


def positional_source(settings: ModelSettings) -> Callable[[], PositionalMethod]:
    """A function that gives each layer its positional method: the one shared instance, or a new one where the method
    is per layer.
    """
    made: list[PositionalMethod] = []

    def give() -> PositionalMethod:
        if made and made[0].shared:
            return made[0]
        made.append(build(settings.pos_emb, settings.shape(), **dict(settings.pos_emb_options)))
        return made[-1]

    return give


def layer_factories(settings: ModelSettings) -> dict[int, Callable[[], nn.Module]]:
    """Layer index -> a function that builds the layer. Layers built in one process share the positional method."""
    positional = positional_source(settings)
    last = settings.num_layers
    factories: dict[int, Callable[[], nn.Module]] = {0: lambda: Embedding(settings, positional())}
    for index in range(last):
        factories[2 + index] = lambda: TransformerBlock(settings, positional())
    factories[last + 3] = lambda: FinalNorm(settings)
    factories[last + 4] = lambda: Output(settings)
    return factories


def initialize(
    layers: dict[int, nn.Module],
    settings: ModelSettings,
    *,
    seed: int,
    init_method: str,
    output_init_method: str,
    std: float,
) -> None:
    """Fill the weights of the given layers in place; the result does not depend on which layers are here."""
    sizes = {"std": std, "num_layers": settings.num_layers, "hidden_size": settings.hidden_size}
    reader = initializer(init_method, **sizes)
    writer = initializer(output_init_method, **sizes)
    for index, layer in layers.items():
        if settings.tied_embeddings and index == settings.num_layers + 4:
            continue  # the embedding's values are its own
        initialize_layer(layer, index, seed=seed, reader=reader, writer=writer, tensor_parallel_rank=settings.tp.rank)


class GPT(nn.Module):
    """A decoder-only language model as a plain sequence of layers.

    The submodules are named by their layer index, as DeepSpeed's PipelineModule names them, so that a parameter has
    the same name in both.

    forward: int64 tokens `[b, s]` -> logits `[b, s, v]`.
    """

    def __init__(self, settings: ModelSettings, *, checkpoint_every: int = 0):
        """`checkpoint_every`: recompute activations in groups of so many blocks; 0 keeps them all."""
        super().__init__()
        self.settings = settings
        self.checkpoint_every = checkpoint_every
        for index, factory in layer_factories(settings).items():
            self.add_module(str(index), factory())
        if settings.tied_embeddings:
            self.output.final_linear.weight = self.embedding.word_embeddings.weight

    @property
    def embedding(self) -> Embedding:
        return self.get_submodule("0")

    @property
    def blocks(self) -> list[TransformerBlock]:
        return [self.get_submodule(str(2 + index)) for index in range(self.settings.num_layers)]

    @property
    def output(self) -> Output:
        return self.get_submodule(str(self.settings.num_layers + 4))

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer."""
        return {int(name): module for name, module in self.named_children()}

    def positional_methods(self) -> dict[int, PositionalMethod]:
        """Layer index -> its positional method; one entry when the method is shared by the layers."""
        return positional_methods(self.layers())

    def new_cache(self, batch_size: int | None = None, max_length: int | None = None) -> KVCache:
        """An empty cache for incremental decoding; `max_length` tokens are reserved at once when given."""
        return KVCache(self.settings.num_layers, max_length)

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, span: Span = FULL) -> Tensor:
        """Hidden states after the final norm, `[b, s, e]`.

        With a cache, `tokens` follow those it holds. `span`: which keys each query sees, in every layer.
        """
        held = cache.length if cache is not None else 0
        hidden = self.embedding(tokens, offset=held)
        blocks = self.blocks
        tables = self._shared_tables(hidden, span.max_kv_len(held + tokens.shape[1]))
        recompute = self.checkpoint_every and self.training and torch.is_grad_enabled()
        if recompute and cache is None and span == FULL:
            for start in range(0, len(blocks), self.checkpoint_every):
                group = blocks[start : start + self.checkpoint_every]
                hidden = checkpoint(_through, group, hidden, tables, use_reentrant=False)
        else:
            for index, block in enumerate(blocks):
                hidden = block(hidden, cache.layers[index] if cache is not None else None, span, tables)
        return self.get_submodule(str(self.settings.num_layers + 3))(hidden)

    def _shared_tables(self, hidden: Tensor, max_kv_len: int) -> PositionTables | None:
        """The tables of the layers' one method, made once; None where layers must make their own."""
        first, *others = (block.attention for block in self.blocks)
        method = getattr(first, "rpe", None)
        if method is None or any(other.rpe is not method for other in others):
            return None
        if any(hasattr(parameter, "ds_id") for parameter in method.parameters()):
            return None  # ZeRO 3 gathers a parameter for the layers that are called
        return first.position_tables(max_kv_len, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[b, s, e] -> [b, s, v]`, gathered over the tensor-parallel ranks."""
        return gather_vocabulary(self.output(hidden), self.settings.tp)

    def forward(self, tokens: Tensor, cache: KVCache | None = None, span: Span = FULL) -> Tensor:
        return self.logits(self.hidden(tokens, cache, span))

    def loss(self, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats over the tokens whose mask is not zero; labels int64 and mask float, both `[b,
        s]`.
        """
        return self.output.loss(self.hidden(tokens), labels, mask)


def _through(blocks: list[TransformerBlock], hidden: Tensor, tables: PositionTables | None) -> Tensor:
    for block in blocks:
        hidden = block(hidden, tables=tables)
    return hidden


def positional_methods(layers: dict[int, nn.Module]) -> dict[int, PositionalMethod]:
    """Layer index -> positional method among the given layers; a shared one is listed once, at the first layer that
    holds it.
    """
    found: dict[int, PositionalMethod] = {}
    for index, layer in layers.items():
        for _, method in outermost(layer):
            if all(method is not other for other in found.values()):
                found[index] = method
    return found
