"""The attention layer of a block.

Legend: b batch, s query length (new tokens), t key length (cached tokens in a cache), h heads of
this rank, g heads of keys and values of this rank, n one of both, d head size, e hidden size.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kerple.attention import (
    DEFAULT_MODE,
    FULL,
    AttentionCall,
    AttentionMode,
    Dispatcher,
    Documents,
    ExpectedCalls,
    PositionTables,
    Requirements,
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
from megatron.model.cache import LayerCache
from megatron.model.layers import HeadNorm, split_heads
from megatron.model.parallel import column_linear, row_linear, sum_head_gradients
from megatron.model.settings import ModelSettings
from megatron.utils.errors import UserError


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
        self.tp = tp
        # The heads of the whole model, and those of this tensor-parallel rank.
        self.head_size, self.num_heads = config.head_size, config.num_attention_heads
        self.queries_per_key = self.num_heads // config.num_kv_heads
        self.local_heads = tp.heads(self.num_heads)
        self.window = config.windows[layer]

        # Queries, keys and values.
        hidden, queries = config.hidden_size, self.num_heads * self.head_size
        outputs = queries + 2 * config.num_kv_heads * self.head_size
        self.query_key_value = column_linear(
            hidden, outputs, bias=config.use_bias_in_attn_linear, tp=tp
        )
        self.normalizes = config.use_qk_layernorm
        if self.normalizes:
            self.query_norm, self.key_norm = HeadNorm(settings), HeadNorm(settings)

        # The positional method. An absolute one belongs to the embedding: `rpe` is then None, and
        # `positional` has the method without registering it.
        check_hooks(positional)
        self.rpe: PositionalMethod | None = None
        if "embed" not in positional.hooks:
            self.rpe = positional
        self.positional: PositionalMethod
        object.__setattr__(self, "positional", positional)
        self.rotates, self.decays = "rotate" in positional.hooks, "decay" in positional.hooks
        self.bf16_distances = config.release_bf16_distances

        # Attention, and the projection back to the hidden size.
        self.dropout = config.attention_dropout
        self.backend = config.attention_backend
        check_backend(self.backend, Requirements.of(positional))
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
            # Every rank computes the decay of all heads from the same states, and keeps its own.
            of_all_heads = self.positional.decay(hidden)
            decay = sum_head_gradients(of_all_heads, self.tp)[:, self.local_heads]  # [b, h, s]
        qkv = self.query_key_value(hidden)  # [b, s, (h + 2 g) d]
        context = self.context(qkv, cache, mode, tables, decay, documents)  # [b, s, h d]
        return self.dense(context)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[b, s, (h + 2 g) d]` -> unrotated query `[b, h, s, d]`, key and value `[b, g, s, d]`."""
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
        query, key, value = self.heads(qkv)  # [b, h, s, d], [b, g, s, d]
        start = 0
        if cache is not None:
            start = cache.length
        length = start + qkv.shape[1]
        if mode.scaling is not None:
            query = mode.scale_query(query, torch.arange(start, length, device=query.device))

        # Rotate at the positions of the text. An explicit mode rotates by distance instead, below.
        explicit = mode.is_explicit(self.rpe)
        if self.rotates and not explicit:
            positions = torch.arange(start, length, device="cpu")
            rotation = mode.rotation(self.positional)
            query, key = rotation.rotate(query, key, positions, positions)

        # Running sums of a decay that depends on the token. The cache stores them next to keys and
        # values, and continues them.
        sums = None
        if decay is not None:
            before: Tensor | None = None
            if cache is not None and (last := cache.last()) is not None:
                before = last[2].squeeze(3)  # [b, h, 1]
            sums = decay_sums(decay, before)  # [b, h, s]
        if cache is not None:
            if sums is None:
                key, value = cache.append(key, value)  # [b, g, t, d]
            else:
                key, value, stored = cache.append(key, value, sums[..., None])
                sums = stored.squeeze(3)  # [b, h, t]

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
            return context.transpose(1, 2).flatten(2)  # [b, s, h d]

        # All others use a backend and its tables over the distances.
        if tables is None:
            tables = self.position_tables(length, query, mode)
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=self.head_size**-0.5,
            method=self.rpe,
            tables=tables,
            decay_sums=sums,
            span=span,
            documents=documents,
            dropout_p=dropout,
            dropped=length - key.shape[2],
        )
        context = self.attention(call)  # [b, h, s, d]
        return context.transpose(1, 2).flatten(2)

    def position_tables(
        self, length: int, states: Tensor, mode: AttentionMode = DEFAULT_MODE
    ) -> PositionTables:
        """Tables over the distances in a text of `length` tokens, of this rank's heads, on the
        device of the states `[b, ..., s, e or d]`. All layers that share a positional method can
        share its tables.
        """
        device, method = states.device, self.rpe
        if method is not None and mode.is_explicit(method):
            return PositionTables()
        span = mode.span.within(self.window)
        max_kv_len = span.max_kv_len(length)
        # A method with scores of its own has one table. If a map moves its distances, it is as long
        # as the text, even with a window.
        if method is not None and "modify_scores" in method.hooks:
            distances = max_kv_len
            if mode.distance_map is not None and not method.shift_invariant:
                distances = length
            scores = score_table(method, distances, device, distance_map=mode.distance_map)
            return PositionTables(scores=scores)

        # The tables of this rank's heads.
        tables = PositionTables()
        if method is not None:
            bias, weight = self._tables(max_kv_len, device, mode)
            tables = PositionTables(bias=bias, weight=weight)

        # Elsewhere than in the fused kernels, the tables alone are enough.
        heads = self.local_heads.stop - self.local_heads.start
        shape = (len(states), heads, states.shape[-2], self.head_size)
        plain = span == FULL and states.shape[-2] == length
        if not runs_fused(method, self.backend, states, shape, plain=plain):
            return tables

        # The kernels also use the jacobians of tables that are exact functions of the distance.
        exact = mode.distance_map is None and not self.bf16_distances
        if method is not None and exact and torch.is_grad_enabled():
            of_bias, of_weight = jacobians(method, max_kv_len, device)
            tables = replace(
                tables,
                bias_jacobian=self._local_jacobian(of_bias),
                weight_jacobian=self._local_jacobian(of_weight),
            )
        return prepare_tables(tables, heads, max_kv_len, device)

    def expected_calls(
        self, device: torch.device, dtype: torch.dtype, **others: bool
    ) -> ExpectedCalls:
        """The calls of this layer, with the heads of all tensor-parallel ranks. others: `training`
        and `documents`.
        """
        return ExpectedCalls(
            method=self.positional,
            heads=self.num_heads,
            kv_heads=self.num_heads // self.queries_per_key,
            head_size=self.head_size,
            device=device,
            dtype=dtype,
            windowed=self.window is not None,
            **others,
        )

    def _local_jacobian(self, jacobian: TableJacobian | None) -> TableJacobian | None:
        if jacobian is None:
            return None
        return replace(
            jacobian,
            coefficients=self._local(jacobian.coefficients),
            directions=jacobian.directions[self.local_heads],
        )

    def _tables(
        self, end: int, device: torch.device, mode: AttentionMode, first: int = 0
    ) -> tuple[Tensor | None, Tensor | None]:
        """(bias, weight) at the distances `first` ... end-1, of this rank's heads."""
        # The method computes all heads, whose number a method of one's own may get wrong.
        local: list[Tensor | None] = []
        of_all_heads = tables(
            self.positional,
            end,
            device,
            rounded=self.bf16_distances,
            distance_map=mode.distance_map,
            first=first,
        )
        for name, table in zip(("bias", "weight"), of_all_heads, strict=True):
            if table is None:
                local.append(None)
                continue
            if len(table) != self.num_heads:
                method = type(self.positional).__name__
                raise UserError(
                    f"{method}.{name} returned {list(table.shape)} for {end - first} distances; it "
                    f"must return [heads, distances], with {self.num_heads} heads"
                )
            local.append(self._local(table))
        bias, weight = local
        return bias, weight

    def _local(self, values: Tensor) -> Tensor:
        """This rank's rows of values of all heads, computed from replicated parameters."""
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
            expected = layer.expected_calls(device, dtype, documents=documents)
            choices.append(describe_choice(expected, layer.backend))
    # Most models have one choice for all layers.
    return "; in other layers ".join(dict.fromkeys(choices))
