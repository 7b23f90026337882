"""The attention layer of a block, and the key-value cache for incremental decoding and chunked
evaluation.

Legend: b batch, s query length (new tokens), t key length (cached tokens in a cache), h heads of
this rank, g heads of keys and values of this rank, n one of both, d head size, e hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kerple.attention import (
    DEFAULT_MODE,
    FULL,
    AttentionCall,
    AttentionMode,
    Dispatcher,
    Documents,
    PositionTables,
    Requirements,
    Span,
    attend_in_mode,
    check_backend,
    describe_choice,
    jacobians,
    prepare_tables,
    runs_fused,
    score_table,
    tables,
)
from kerple.attention.attention import check_hooks
from kerple.positional import PositionalMethod, TableJacobian, decay_sums
from megatron.model.layers import HeadNorm
from megatron.model.parallel import column_linear, row_linear, sum_head_gradients
from megatron.model.settings import ModelSettings
from megatron.utils.errors import UserError


class LayerCache:
    """The states of one layer, `[b, n, t, size]` each: keys (stored after rotation), values, and
    with a decay its prefix sums.

    Buffers are allocated for `max_length` tokens if that is given. Otherwise they double in size
    whenever they are full, so appending a token costs amortized constant time. With a `window`,
    keys that no later query sees are dropped, and the buffers have at most two windows plus the new
    tokens. With `sinks`, the first tokens of the text are kept as well.
    """

    def __init__(self, max_length: int | None = None, window: int | None = None, sinks: int = 0):
        self.max_length = max_length
        self.window = window
        self.sinks = 0 if window is None else sinks
        self.length = 0  # of the text, including dropped tokens
        self._stored = 0  # in the buffers
        self._sinks: list[Tensor] = []  # [b, n, up to `sinks`, size] each
        self._buffers: list[Tensor] = []  # [b, n, capacity, size] each

    def append(self, *states: Tensor) -> list[Tensor]:
        """Append states `[b, n, s, size]`, the same kinds in each call; return all of them,
        `[b, n, t + s, size]`, as views of the buffers. With a window, t is at most `sinks` +
        `window` - 1. If there are sinks and tokens after them were dropped, they are copies.
        """
        new = states[0].shape[2]
        first = 0 if self.window is None else max(0, self._stored - self.window + 1)
        capacity = self._buffers[0].shape[2] if self._buffers else 0
        if not self._buffers or self._stored + new > capacity:
            kept = self._stored - first
            capacity = max(kept + new, self.max_length or max(64, 2 * capacity))
            if self.window is not None:
                capacity = min(capacity, kept + new + self.window)
            larger = [part.new_empty(*part.shape[:2], capacity, part.shape[3]) for part in states]
            for buffer, old in zip(larger, self._buffers, strict=False):
                buffer[:, :, :kept] = old[:, :, first : self._stored]
            self._buffers, self._stored, first = larger, kept, 0
        end = self._stored + new
        for buffer, part in zip(self._buffers, states, strict=True):
            buffer[:, :, self._stored : end] = part
        self._stored, self.length = end, self.length + new
        recent = [buffer[:, :, first:end] for buffer in self._buffers]
        if self.sinks:
            missing_sinks = self.sinks - (self._sinks[0].shape[2] if self._sinks else 0)
            if missing_sinks > 0:
                more = [part[:, :, :missing_sinks] for part in states]
                pairs = (
                    zip(self._sinks, more, strict=True)
                    if self._sinks
                    else ((part,) for part in more)
                )
                self._sinks = [torch.cat(parts, dim=2) for parts in pairs]
            dropped = self.length - (end - first)  # the position of the first recent token
            if dropped:
                pairs = zip(self._sinks, recent, strict=True)
                recent = [torch.cat((sinks[:, :, :dropped], part), dim=2) for sinks, part in pairs]
        return recent

    def last(self) -> list[Tensor] | None:
        """The states of the last token, `[b, n, 1, size]` each; None if there is none."""
        return [buffer[:, :, self._stored - 1 : self._stored] for buffer in self._buffers] or None

    def select(self, rows: Tensor) -> None:
        self._buffers = [buffer[rows] for buffer in self._buffers]
        self._sinks = [sinks[rows] for sinks in self._sinks]


class KVCache:
    """The key-value cache for incremental decoding and chunked evaluation: one `LayerCache` per
    block.
    """

    def __init__(self, spans: Sequence[Span], max_length: int | None = None):
        """spans: the keys that the queries of each block attend to."""
        self.layers = [LayerCache(max_length, span.window, span.sinks) for span in spans]

    @property
    def length(self) -> int:
        """Number of tokens so far, which is the position of the next token."""
        return self.layers[0].length

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows with these int64 indices, in this order."""
        rows = torch.as_tensor(rows, dtype=torch.long)
        for layer in self.layers:
            layer.select(rows)


class _SplitHeads(torch.autograd.Function):
    """`[b, s, 3 h d]` -> query, key and value `[b, h, s, d]`.

    GPT-NeoX groups the rows of query_key_value by head: each head's query, key and value are
    adjacent. The backward pass copies nothing if attention wrote the gradients in this layout.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, head_size: int) -> tuple[Tensor, ...]:
        return qkv.view(*qkv.shape[:2], -1, 3, head_size).permute(3, 0, 2, 1, 4).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        query = grads[0]
        batch, heads, length, head_size = query.shape
        row = 3 * heads * head_size
        if not torch.compiler.is_compiling():
            strides, start = (length * row, 3 * head_size, row, 1), query.storage_offset()
            layouts = [(grad.stride(), grad.storage_offset() - start) for grad in grads]
            is_packed = layouts == [(strides, index * head_size) for index in range(3)]
            if is_packed and len({grad.untyped_storage()._cdata for grad in grads}) == 1:
                return query.as_strided((batch, length, row), (length * row, row, 1)), None
        return torch.stack([grad.transpose(1, 2) for grad in grads], dim=3).view(
            batch, length, row
        ), None


def split_heads(
    qkv: Tensor, head_size: int, queries_per_key: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """`[b, s, (h + 2 g) d]` -> query `[b, h, s, d]`, key and value `[b, g, s, d]`, for h = g *
    `queries_per_key`.

    Rows of query_key_value are grouped by key head: the queries that share a key, the key, and its
    value. With one query per key, this is GPT-NeoX's layout. With more, GPT-NeoX has all queries of
    a tensor-parallel rank, then its keys, then its values, so that its layout depends on the number
    of ranks.
    """
    if queries_per_key == 1:
        return cast(tuple[Tensor, Tensor, Tensor], _SplitHeads.apply(qkv, head_size))
    groups = qkv.unflatten(-1, (-1, queries_per_key + 2, head_size)).transpose(
        1, 2
    )  # [b, g, s, h / g + 2, d]
    query, key, value = groups.split((queries_per_key, 1, 1), dim=3)
    return query.transpose(2, 3).flatten(1, 2), key.squeeze(3), value.squeeze(3)


class SelfAttention(nn.Module):
    """Causal self-attention with a positional method.

    With fewer heads of keys than of queries, consecutive query heads share a key head
    (grouped-query attention, arXiv 2305.13245). With a window, a query attends to the last `window`
    keys in every call.
    """

    def __init__(self, settings: ModelSettings, positional: PositionalMethod, layer: int = 0):
        """layer: the index of the block."""
        super().__init__()
        config, tp = settings.config, settings.tp
        hidden, bias = config.hidden_size, config.use_bias_in_attn_linear
        queries, keys = (
            heads * config.head_size for heads in (config.num_attention_heads, config.num_kv_heads)
        )
        self.head_size, self.num_heads = config.head_size, config.num_attention_heads
        self.queries_per_key = config.num_attention_heads // config.num_kv_heads
        self.window = config.windows[layer]
        self.tp = tp
        self.local_heads = tp.heads(config.num_attention_heads)
        self.query_key_value = column_linear(hidden, queries + 2 * keys, bias=bias, tp=tp)
        self.normalizes = config.use_qk_layernorm
        if self.normalizes:
            self.query_norm, self.key_norm = HeadNorm(settings), HeadNorm(settings)
        if "embed" not in positional.hooks:
            self.rpe = positional
        # The method without registering it: an absolute one belongs to the embedding.
        self.positional: PositionalMethod
        object.__setattr__(self, "positional", positional)
        self.rotates, self.decays = "rotate" in positional.hooks, "decay" in positional.hooks
        self.bf16_distances = config.release_bf16_distances
        self.dropout = config.attention_dropout
        check_hooks(positional)
        check_backend(config.attention_backend, Requirements.of(positional))
        self.backend = config.attention_backend
        self.attention: Callable[[AttentionCall], Tensor] = Dispatcher(self.backend)
        self.dense = row_linear(queries, hidden, bias=config.use_bias_in_attn_output, tp=tp)

    def forward(
        self,
        hidden: Tensor,
        cache: LayerCache | None = None,
        mode: AttentionMode = DEFAULT_MODE,
        tables: PositionTables | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """`[b, s, e] -> [b, s, e]`. With a cache, the tokens follow the cached ones. `tables` are
        computed if None.

        documents: a query attends only to keys of its own document; without a cache and in the
            default mode.
        """
        decay = None
        if self.decays:
            decay = sum_head_gradients(self.rpe.decay(hidden), self.tp)[:, self.local_heads]
        return self.dense(
            self.context(self.query_key_value(hidden), cache, mode, tables, decay, documents)
        )

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[b, s, (h + 2 g) d]` -> query `[b, h, s, d]`, key and value `[b, g, s, d]`, before
        rotation.
        """
        query, key, value = split_heads(qkv, self.head_size, self.queries_per_key)
        if self.normalizes:
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def context(
        self,
        qkv: Tensor,
        cache: LayerCache | None,
        mode: AttentionMode,
        tables: PositionTables | None,
        decay: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """The heads' outputs, `[b, s, (h + 2 g) d] -> [b, s, h d]`. decay: `[b, h, s]`, if the
        positional method has it.
        """
        # Queries, keys and values. Logit scaling needs the queries' positions in the text.
        span = mode.span.within(self.window)
        query, key, value = self.heads(qkv)
        start = cache.length if cache is not None else 0
        length = start + qkv.shape[1]
        if mode.scaling is not None:
            query = mode.scale_query(query, torch.arange(start, length, device=query.device))

        # Rotate at the positions of the text. An explicit mode rotates by distance instead, below.
        explicit = mode.is_explicit(getattr(self, "rpe", None))
        if self.rotates and not explicit:
            positions = torch.arange(start, length, device="cpu")
            query, key = mode.rotation(self.rpe).rotate(query, key, positions, positions)

        # Running sums of a decay that depends on the token, continued from the cache.
        sums = None
        if decay is not None:
            last = cache.last() if cache is not None else None
            sums = decay_sums(decay, None if last is None else last[2].squeeze(3))

        # The cache stores these sums next to keys and values.
        if cache is not None and sums is not None:
            key, value, sums = cache.append(key, value, sums[..., None])
            sums = sums.squeeze(3)
        elif cache is not None:
            key, value = cache.append(key, value)

        # Modes that change distances compute the scores explicitly.
        if explicit:
            context = attend_in_mode(
                query,
                key,
                value,
                self.positional,
                replace(mode.for_layer(self.positional), span=span),
                start=start,
                tables_at=lambda first, end: self._tables(end, query.device, mode, first),
                decay_sums=sums,
            )
            return context.transpose(1, 2).flatten(2)

        # All others use a backend and its tables over the distances.
        if tables is None:
            tables = self.position_tables(length, query, mode)
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=self.head_size**-0.5,
            method=getattr(self, "rpe", None),
            tables=tables,
            decay_sums=sums,
            span=span,
            documents=documents,
            dropout_p=self.dropout if self.training else 0.0,
            dropped=length - key.shape[2],
        )
        return self.attention(call).transpose(1, 2).flatten(2)

    def position_tables(
        self, length: int, states: Tensor, mode: AttentionMode = DEFAULT_MODE
    ) -> PositionTables:
        """Tables over the distances in a text of `length` tokens, of this rank's heads, on the
        device of the states `[b, ..., s, e or d]`. All layers that share a positional method can
        share its tables.
        """
        device, method = states.device, getattr(self, "rpe", None)
        if method is not None and mode.is_explicit(method):
            return PositionTables()
        span = mode.span.within(self.window)
        max_kv_len = span.max_kv_len(length)
        if method is not None and "modify_scores" in method.hooks:
            distances = (
                max_kv_len if mode.distance_map is None or method.shift_invariant else length
            )
            return PositionTables(
                scores=score_table(method, distances, device, distance_map=mode.distance_map)
            )

        # This rank's heads of the tables, and of their jacobians if the backend uses them.
        heads = self.local_heads.stop - self.local_heads.start
        shape = (len(states), heads, states.shape[-2], self.head_size)
        plain = span == FULL and states.shape[-2] == length
        is_fused = runs_fused(method, self.backend, states, shape, plain=plain)
        tables = PositionTables()
        if method is not None:
            bias, weight = self._tables(max_kv_len, device, mode)
            tables = replace(tables, bias=bias, weight=weight)
            if (
                is_fused
                and torch.is_grad_enabled()
                and mode.distance_map is None
                and not self.bf16_distances
            ):
                bias_jacobian, weight_jacobian = map(
                    self._local_jacobian, jacobians(method, max_kv_len, device)
                )
                tables = replace(
                    tables, bias_jacobian=bias_jacobian, weight_jacobian=weight_jacobian
                )
        return prepare_tables(tables, heads, max_kv_len, device) if is_fused else tables

    def _local_jacobian(self, jacobian: TableJacobian | None) -> TableJacobian | None:
        if jacobian is None:
            return None
        coefficients, directions = (
            self._local(jacobian.coefficients),
            jacobian.directions[self.local_heads],
        )
        return replace(jacobian, coefficients=coefficients, directions=directions)

    def _tables(
        self, end: int, device: torch.device, mode: AttentionMode, first: int = 0
    ) -> tuple[Tensor | None, Tensor | None]:
        """(bias, weight) at the distances `first` ... end-1, of this rank's heads."""
        bias, weight = tables(
            self.positional,
            end,
            device,
            rounded=self.bf16_distances,
            distance_map=mode.distance_map,
            first=first,
        )
        for name, table in (("bias", bias), ("weight", weight)):
            if table is not None and len(table) != self.num_heads:
                method = type(self.positional).__name__
                raise UserError(
                    f"{method}.{name} returned {list(table.shape)} for {end - first} distances; it "
                    f"must return [heads, distances], with {self.num_heads} heads"
                )
        return None if bias is None else self._local(bias), None if weight is None else self._local(
            weight
        )

    def _local(self, values: Tensor) -> Tensor:
        """The rows of this rank's heads, from values `[h, ...]` of all heads, computed from
        replicated parameters.
        """
        return sum_head_gradients(values, self.tp)[self.local_heads]


def describe_backends(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, documents: bool = False
) -> str:
    """The attention backends of the layers and why they were chosen; empty for a pipeline stage
    without layers.

    documents: see `describe_choice`.
    """
    choices = []
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            choice = describe_choice(
                layer.positional,
                layer.backend,
                device,
                dtype,
                layer.head_size,
                windowed=layer.window is not None,
                documents=documents,
            )
            choices.append(choice)
    return "; in other layers ".join(dict.fromkeys(choices))
