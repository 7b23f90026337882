"""The GPT model, from the embedding to the loss.

The layers have GPT-NeoX's indices: 0 embedding, 2 ... L+1 blocks, L+3 final norm, L+4 output. The
indices 1 and L+2 are functions without parameters in GPT-NeoX, and unused here. `GPT` runs the
layers as a plain sequence, `pipeline.py` as stages of DeepSpeed's pipeline (with identities at 1
and L+2). Parameter names are those of GPT-NeoX's checkpoints.

Legend: b batch, s tokens, e hidden size, v padded vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kerple.attention import DEFAULT_MODE, AttentionMode, Documents, PositionTables
from kerple.positional import PositionalMethod, build, outermost
from megatron.model import fused_block
from megatron.model.attention import SelfAttention
from megatron.model.cache import KVCache, LayerCache
from megatron.model.layers import make_mlp, make_norm
from megatron.model.loss import linear_cross_entropy, mean_loss, needs_chunks
from megatron.model.parallel import (
    column_linear,
    gather_vocabulary,
    tensor_parallel_group,
    vocab_embedding,
)
from megatron.model.settings import ModelSettings

# What is added to the residual: states [n, e] and a bias [e]. The next norm adds both.
Update = tuple[Tensor | None, Tensor | None]
# Window of a layer -> the tables of all layers with this window.
SharedTables = dict[int | None, PositionTables]


# -- the layers, from the embedding to the output --------------------------------------------------


class TransformerBlock(nn.Module):
    """Layers 2 ... L+1: pre-norm attention and MLP, `[b, s, e] -> [b, s, e]`.

    The residuals are sequential, or parallel as in GPT-J: attention and MLP then read the same
    input. In training on a GPU, `fused_block.py` computes the same with fewer kernels.
    """

    def __init__(self, settings: ModelSettings, positional: PositionalMethod, layer: int = 0):
        """layer: the index of the block."""
        super().__init__()
        self.input_layernorm = make_norm(settings.config)
        self.attention = SelfAttention(settings, positional, layer)
        self.post_attention_layernorm = make_norm(settings.config)
        self.mlp = make_mlp(settings)
        self.dropout = nn.Dropout(settings.config.hidden_dropout)
        self.parallel_residual = settings.config.gpt_j_residual

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        mode: AttentionMode = DEFAULT_MODE,
        tables: PositionTables | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        if cache is None and mode == DEFAULT_MODE and self.uses_kernels(hidden):
            flat = hidden.flatten(0, 1)  # [n, e]
            flat, update = self.fused(flat, (None, None), hidden.shape, tables, documents)
            return _added(flat, *update).view(hidden.shape)

        # Attention reads the normed states and adds to the residual.
        normed = self.input_layernorm(hidden)  # [b, s, e]
        attended = self.dropout(self.attention(normed, cache, mode, tables, documents))  # [b, s, e]
        if self.parallel_residual:
            # As in GPT-J, the MLP does not read what attention adds. The order of these operations
            # decides the bits of the gradients.
            attended = hidden + attended
            return attended + self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        hidden = hidden + attended

        # The MLP reads the result of attention.
        normed = self.post_attention_layernorm(hidden)  # [b, s, e]
        return hidden + self.dropout(self.mlp(normed))

    def uses_kernels(self, hidden: Tensor) -> bool:
        """Whether the functions of `fused_block.py` can compute the block for these states."""
        # They have a backward pass of their own, and no decay.
        if self.attention.decays or not (self.training and torch.is_grad_enabled()):
            return False
        weight = cast(Tensor, self.attention.dense.weight)
        # ZeRO 3 gathers parameters only during the call of their module.
        is_gathered_late = hasattr(weight, "ds_id")
        if weight.dtype != hidden.dtype or is_gathered_late or torch.is_autocast_enabled("cuda"):
            return False
        # Last, the device, the dtype and the hidden size.
        return fused_block.uses_kernels(hidden.device, hidden.dtype, hidden.shape[-1])

    def fused(
        self,
        hidden: Tensor,
        update: Update,
        shape: torch.Size,
        tables: PositionTables | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Update]:
        """The block with the functions of `fused_block.py`: from the residual `[n, e]` without its
        last update to the residual and what remains to be added to it. shape: `[b, s, e]`.
        """
        # Norm and projection, which also add the last update to the residual.
        attention = self.attention
        group = tensor_parallel_group(attention.tp)
        projection, dense = attention.query_key_value, attention.dense
        hidden, qkv = fused_block.norm_linear(
            hidden, *update, self.input_layernorm, projection.weight, projection.bias, group
        )

        # Attention, and its projection without the bias, which the next norm adds.
        qkv = qkv.view(*shape[:2], -1)  # [b, s, (h + 2 g) d]
        context = attention.context(qkv, None, DEFAULT_MODE, tables, documents=documents)
        attended = fused_block.row_linear(context.flatten(0, 1), dense.weight, group)  # [n, e]
        update = self._dropped(attended, cast("Tensor | None", dense.bias))

        # With parallel residuals, the MLP does not read what attention adds.
        norm, mlp = self.post_attention_layernorm, self.mlp
        if self.parallel_residual:
            # The MLP reads the norm of the block's input; attention's update is added after that.
            hidden, states, bias = fused_block.mlp_update(hidden, None, None, norm, mlp, group)
            hidden = _added(hidden, *update)
        else:
            # The norm before the MLP adds attention's update, too.
            hidden, states, bias = fused_block.mlp_update(hidden, *update, norm, mlp, group)
        return hidden, self._dropped(states, bias)

    def _dropped(self, states: Tensor, bias: Tensor | None) -> Update:
        """An update with the block's dropout, which applies to its bias as well."""
        if self.dropout.p == 0:
            return states, bias
        if bias is not None:
            states = states + bias
        return self.dropout(states), None  # the bias is in the states now


class Embedding(nn.Module):
    """Layer 0: token embeddings, plus position embeddings for absolute methods; int64
    `[b, s] -> [b, s, e]`.
    """

    def __init__(self, settings: ModelSettings, positional: PositionalMethod):
        super().__init__()
        self.word_embeddings = vocab_embedding(
            settings.padded_vocab_size, settings.config.hidden_size, tp=settings.tp
        )
        # An absolute method is this layer's submodule; all others are submodules of attention.
        self.embeds = "embed" in positional.hooks
        if self.embeds:
            self.position_embeddings = positional
        self.dropout = nn.Dropout(settings.config.hidden_dropout)

    def forward(
        self, tokens: Tensor, offset: int = 0, documents: Documents | None = None
    ) -> Tensor:
        """`offset`: the position of the first token. In documents, positions start at 0."""
        hidden = self.word_embeddings(tokens)  # [b, s, e]
        if self.embeds:
            positions = torch.arange(offset, offset + tokens.shape[1], device="cpu")
            if documents is None:
                hidden = self.position_embeddings.embed(hidden, positions)  # [b, s, e]
            else:
                # The vectors of all positions, of which each token takes that in its document.
                zeros = torch.zeros_like(hidden[:1])
                (vectors,) = self.position_embeddings.embed(zeros, positions)  # [s, e]
                hidden = hidden + F.embedding(documents.positions, vectors)
        return self.dropout(hidden)


class FinalNorm(nn.Module):
    """Layer L+3: `[b, s, e] -> [b, s, e]`."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.norm = make_norm(settings.config)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class VocabularyLinear(nn.Linear):
    """`[..., e] -> [..., v]`; with labels `[n]`: hidden states `[n, e]` -> the sum of the tokens'
    losses.

    The loss is computed inside a call of this module because ZeRO 3 gathers the weight only during
    that call.
    """

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels, mask)


class Output(nn.Module):
    """Layer L+4: the projection to the vocabulary, `[b, s, e] -> [b, s, v / tensor-parallel size]`,
    without bias.

    Attributes:
        in_loss: return the hidden states unchanged, for a pipeline whose loss function calls
            `loss`.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.tp = settings.tp
        self.in_loss = False
        # One rank has the rows of the whole vocabulary; tensor-parallel ranks have a part of them.
        if self.tp.size == 1:
            self.final_linear: nn.Module = VocabularyLinear(
                settings.config.hidden_size, settings.padded_vocab_size, bias=False
            )
        else:
            self.final_linear = column_linear(
                settings.config.hidden_size, settings.padded_vocab_size, bias=False, tp=settings.tp
            )

    def forward(self, hidden: Tensor) -> Tensor:
        if self.in_loss:
            return hidden
        return self.final_linear(hidden)

    def loss(self, hidden: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over the tokens of the cross entropy in nats times the weight (default: 1): hidden
        `[b, s, e]`, labels int64 `[b, s]`, weights float `[b, s]`. Large logits are computed in
        chunks, as are all logits under tensor parallelism (see `loss.py`).
        """
        weight = cast(nn.Parameter, self.final_linear.weight)
        # The full shape: under ZeRO 3 the weight is empty outside of the module's call.
        vocabulary = getattr(weight, "ds_shape", weight.shape)[0]
        tokens, on_one_rank = labels.numel(), self.tp.size == 1
        if on_one_rank and not needs_chunks(hidden.device, hidden.dtype, tokens, vocabulary):
            # All logits at once, [b, s, v].
            return mean_loss(self.final_linear(hidden), labels, weights)

        # In chunks of tokens, [n, e] and [n], so that the logits are never in memory at once.
        flat_hidden, flat_labels, flat_weights = hidden.flatten(0, 1), labels.flatten(), None
        if weights is not None:
            flat_weights = weights.flatten()
        if on_one_rank:
            total = self.final_linear(flat_hidden, flat_labels, flat_weights)
        else:
            # This rank has the rows of the vocabulary from `first_token` on.
            total = linear_cross_entropy(
                flat_hidden,
                weight,
                flat_labels,
                flat_weights,
                first_token=self.tp.rank * len(weight),
                group=tensor_parallel_group(self.tp),
            )
        return total / tokens


# -- the layers of a model, of which a pipeline stage builds only its own --------------------------


def layer_factories(settings: ModelSettings) -> dict[int, Callable[[], nn.Module]]:
    """Layer index -> a function that builds the layer.

    Layers built in one process share one instance of the positional method, unless the method is
    per layer.
    """
    # The methods that were built, in the order of the layers.
    config, methods = settings.config, list[PositionalMethod]()

    def positional(layer: int = 0) -> PositionalMethod:
        # The first layer builds a shared method, and the others get the same instance.
        if not (methods and methods[0].shared):
            shape = replace(config.shape, layer=layer)
            methods.append(build(config.pos_emb, shape, **config.positional_options))
        return methods[-1]

    def block(layer: int) -> nn.Module:
        return TransformerBlock(settings, positional(layer), layer)

    # The indices of GPT-NeoX, which also names two functions without parameters.
    factories: dict[int, Callable[[], nn.Module]] = {0: lambda: Embedding(settings, positional())}
    for layer in range(config.num_layers):
        factories[layer + 2] = partial(block, layer)
    factories[config.num_layers + 3] = lambda: FinalNorm(settings)
    factories[config.num_layers + 4] = lambda: Output(settings)
    return factories


def positional_methods(layers: dict[int, nn.Module]) -> dict[int, PositionalMethod]:
    """Layer index -> positional method, for the given layers. A shared method is listed once, at
    its first layer.
    """
    methods: dict[int, PositionalMethod] = {}
    for index, layer in layers.items():
        for _, method in outermost(layer):
            # A shared method is the same object in every layer.
            if all(method is not listed for listed in methods.values()):
                methods[index] = method
    return methods


@contextmanager
def text_length(methods: Iterable[PositionalMethod], length: int) -> Iterator[None]:
    """Within, the methods read texts of `length` tokens (see `PositionalMethod.begin_text`)."""
    methods = list(methods)
    for method in methods:
        method.begin_text(length)
    try:
        yield
    finally:
        # The length is not known outside, also after an error.
        for method in methods:
            method.begin_text(None)


# -- the model: from tokens to logits or the loss --------------------------------------------------


class GPT(nn.Module):
    """A decoder-only language model as a plain sequence of layers.

    Submodules are named by their layer index, as in DeepSpeed's PipelineModule, so both have the
    same parameter names.

    forward: int64 tokens `[b, s]` -> logits `[b, s, v]`.
    """

    def __init__(self, settings: ModelSettings, *, checkpoint_every: int = 0):
        """checkpoint_every: recompute activations in the backward pass, in groups of this many
        blocks; 0: never.
        """
        super().__init__()
        self.settings = settings
        # Of the checkpoint that the weights are from: its `saved_training`.
        self.provenance: dict[str, Any] = {}
        self.checkpoint_every = checkpoint_every
        for index, factory in layer_factories(settings).items():
            self.add_module(str(index), factory())
        # Weight tying: the output reads the embedding's matrix [v, e].
        if not settings.config.no_weight_tying:
            self.output.final_linear.weight = self.embedding.word_embeddings.weight

    @property
    def embedding(self) -> Embedding:
        return cast(Embedding, self.get_submodule("0"))

    @property
    def blocks(self) -> list[TransformerBlock]:
        names = map(str, range(2, self.settings.config.num_layers + 2))
        return [cast(TransformerBlock, self.get_submodule(name)) for name in names]

    @property
    def output(self) -> Output:
        return cast(Output, self.get_submodule(str(self.settings.config.num_layers + 4)))

    def layers(self) -> dict[int, nn.Module]:
        """Layer index -> layer."""
        return {int(name): module for name, module in self.named_children()}

    def positional_methods(self) -> dict[int, PositionalMethod]:
        """Layer index -> its positional method; one entry if the layers share the method."""
        return positional_methods(self.layers())

    def new_cache(
        self, max_length: int | None = None, mode: AttentionMode = DEFAULT_MODE
    ) -> KVCache:
        """An empty cache for incremental decoding in a mode; allocates `max_length` tokens at once
        if it is given. With a window, it drops keys that no later query attends to.
        """
        spans = [mode.span.within(window) for window in self.settings.config.windows]
        return KVCache(spans, max_length)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        mode: AttentionMode = DEFAULT_MODE,
        documents: Documents | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, `[b, s, e]`. With a cache, `tokens` follow the cached
        ones.

        Args:
            mode: how every layer attends. A cache must be that of `new_cache` for the same mode.
            documents: the documents of the tokens, without a cache and in the default mode. A token
                attends only to its own document, in which positions start at 0.
        """
        # Embed the tokens, at the positions after the cached ones.
        start = 0
        if cache is not None:
            start = cache.length
        hidden = self.embedding(tokens, offset=start, documents=documents)  # [b, s, e]

        # The blocks, with tables for all distances of the text: through a cache, in a mode, with
        # activations that are recomputed in groups, or plainly.
        blocks = self.blocks
        tables = self.shared_tables(hidden, start + tokens.shape[1], mode)
        group_size = self.checkpoint_every
        if cache is not None:
            # Decoding: each block appends its keys and values to its own cache.
            for block, layer_cache in zip(blocks, cache.layers, strict=True):
                hidden = block(hidden, layer_cache, mode, tables.get(block.attention.window))
        elif mode != DEFAULT_MODE:
            # An inference mode over the whole text.
            for block in blocks:
                hidden = block(hidden, None, mode, tables.get(block.attention.window))
        elif group_size and self.training and torch.is_grad_enabled():
            # Only the input of each group is stored; the backward pass computes the rest again.
            for first in range(0, len(blocks), group_size):
                group = slice(first, first + group_size)
                arguments = (blocks[group], hidden, tables, documents)
                hidden = checkpoint(run_blocks, *arguments, use_reentrant=False)
        else:
            hidden = run_blocks(blocks, hidden, tables, documents)
        return self.get_submodule(str(self.settings.config.num_layers + 3))(hidden)

    def shared_tables(self, hidden: Tensor, length: int, mode: AttentionMode) -> SharedTables:
        """The tables of the layers with each window, for a text of `length` tokens. They are built
        before the blocks, so that recomputed activations read the same tensors. Empty if each layer
        must compute its own, in its call.
        """
        # Only layers with one method can share its tables.
        tables: SharedTables = {}
        layers = [block.attention for block in self.blocks]
        method = layers[0].rpe  # None for an absolute method
        if method is None or any(layer.rpe is not method for layer in layers):
            return tables
        # ZeRO 3 gathers the method's parameters only during a layer's call.
        if any(hasattr(parameter, "ds_id") for parameter in method.parameters()):
            return tables
        for layer in layers:
            if layer.window not in tables:
                tables[layer.window] = layer.position_tables(length, hidden, mode)
        return tables

    def logits(self, hidden: Tensor) -> Tensor:
        """`[b, s, e] -> [b, s, v]`, gathered over the tensor-parallel ranks."""
        return gather_vocabulary(self.output(hidden), self.settings.tp)

    def forward(
        self, tokens: Tensor, cache: KVCache | None = None, mode: AttentionMode = DEFAULT_MODE
    ) -> Tensor:
        return self.logits(self.hidden(tokens, cache, mode))

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        documents: Documents | None = None,
    ) -> Tensor:
        """Mean over the tokens of the cross entropy in nats times the weight (default: 1); labels
        int64 `[b, s]`, weights float `[b, s]`. documents: see `hidden`.
        """
        return self.output.loss(self.hidden(tokens, documents=documents), labels, weights)


# -- the blocks of a text, without a cache and in the default mode ---------------------------------


def run_blocks(
    blocks: list[TransformerBlock],
    hidden: Tensor,
    tables: SharedTables,
    documents: Documents | None,
) -> Tensor:
    """`[b, s, e] -> [b, s, e]` without a cache, in the default mode."""
    if all(block.uses_kernels(hidden) for block in blocks):
        return _run_fused(blocks, hidden, tables, documents)
    for block in blocks:
        hidden = block(hidden, tables=tables.get(block.attention.window), documents=documents)
    return hidden


def _run_fused(
    blocks: Sequence[TransformerBlock],
    hidden: Tensor,
    tables: SharedTables,
    documents: Documents | None,
) -> Tensor:
    """Like `run_blocks`, with the functions of `fused_block.py`."""
    # Each block leaves its last addition to the norm of the next one.
    flat = hidden.flatten(0, 1)  # [n, e]
    update: Update = (None, None)
    for block in blocks:
        shared = tables.get(block.attention.window)
        flat, update = block.fused(flat, update, hidden.shape, shared, documents)
    # The last addition, and the shape [b, s, e] again.
    return _added(flat, *update).view(hidden.shape)


def _added(hidden: Tensor, states: Tensor | None, bias: Tensor | None) -> Tensor:
    """The residual `[n, e]` with an update."""
    if states is None:
        return hidden
    if bias is not None:
        states = states + bias
    return hidden + states
