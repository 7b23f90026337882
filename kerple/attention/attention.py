"""The front door: `Attention` for a positional method, and `attend` for tables of one's own.

    attention = Attention(KerpleLog(num_heads=4))
    context = attention(query, key, value)

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, v size of
the value heads.
"""

import torch
from torch import Tensor, nn

from kerple.attention.backend import Requirements
from kerple.attention.call import AttentionCall, check_documents, check_shapes
from kerple.attention.dispatch import Dispatcher, check_backend, run, runs_fused
from kerple.attention.documents import Documents
from kerple.attention.span import FULL, Span
from kerple.attention.tables import PositionTables, position_tables
from kerple.positional import PositionalMethod


class Attention(nn.Module):
    """Attention of one positional method, whose parameters are the module's.

    It rotates queries and keys, builds the method's tables, and runs the fastest backend.
    """

    def __init__(self, positional: PositionalMethod | None = None, backend: str = "auto"):
        """positional: a method from `kerple.positional`; None for no positions.

        Raises ValueError for an unknown backend and for hooks that exclude each other, and
        NotImplementedError for a backend that does not support the method.
        """
        super().__init__()
        # What no call could compute is rejected before there are tensors.
        check_hooks(positional)
        check_backend(backend, Requirements.of(positional))
        self.positional = positional
        self.backend = backend
        # It remembers the backend that it chose for each kind of call.
        self._run = Dispatcher(backend)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        tables: PositionTables | None = None,
        decay_sums: Tensor | None = None,
        window: int | None = None,
        block: int | None = None,
        documents: Documents | Tensor | None = None,
        key_mask: Tensor | None = None,
        causal: bool = True,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """softmax(weight * q.k * scale + bias) v, or the method's own scores, `[b, h, s, v]`.

        Args:
            query: `[b, h, s, d]`, before rotation. The queries are the last s of the t positions.
            key, value: `[b, g, t, d]`, before rotation, and `[b, g, t, v]`; see `attend`.
            tables: of the method, for the distances below `Span.max_kv_len(t)`. Layers, and steps
                without an update, can share them (see `position_tables`). Computed if None.
            decay_sums: `[b, h, t]`, required if the method has a decay (see
                `kerple.positional.decay_sums`).
            documents: those of the t tokens of each row: integers `[b, t]` as `document_ids` of
                `attend`, or `Documents`, which layers can share. Positions count the tokens of a
                document.
            window, block, key_mask, causal, dropout_p, scale: see `attend`.

        Raises ValueError for arguments that do not fit together or do not fit the method, and
        NotImplementedError if the backend does not support the call.
        """
        # The keys that each query attends to.
        span = FULL
        if window is not None or block is not None or not causal:
            span = Span(window, block, causal=causal)
        if isinstance(documents, Tensor):
            # Ids alone do not know the positions in their documents.
            documents = Documents(documents)

        # What the method computes from the states and their lengths, which are checked first. With
        # shared tables and without a rotation, the call itself checks them.
        method = self.positional
        rotates = method is not None and "rotate" in method.hooks
        if rotates or tables is None:
            check_shapes(query, key, value)
        if tables is None:
            tables = self._tables(query, key, span)
        if rotates:
            query, key = self._rotated(query, key, documents, causal)  # [b, h, s, d], [b, g, t, d]

        # The call is validated, and computed by a backend: [b, h, s, v].
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=scale_or_default(scale, query),
            method=method,
            tables=tables,
            decay_sums=decay_sums,
            span=span,
            documents=documents,
            key_mask=key_mask,
            dropout_p=dropout_p,
        )
        return self._run(call)

    def _rotated(
        self, query: Tensor, key: Tensor, documents: Documents | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Query and key after the method's rotation."""
        method = self.positional
        assert method is not None
        # Causal queries have the last positions, others the first ones.
        s = query.shape[2]
        t = key.shape[2]
        offset = 0
        if causal:
            offset = t - s
        if documents is None:
            # One text: all rows have the same positions, [t] and [s].
            key_positions = torch.arange(t, device="cpu")
            query_positions = torch.arange(offset, offset + s, device="cpu")
            return method.rotate(query, key, query_positions, key_positions)

        # The rows have different documents, so each has its own positions.
        check_documents(documents, len(query), s, t, causal)
        # torch.cat needs at least one row.
        if not len(query):
            return query, key
        positions = documents.positions.cpu()  # [b, t]
        # Where the queries are among the tokens of a row.
        places = documents.places(slice(offset, t), offset)
        queries = []  # of each row, [1, h, s, d]
        keys = []
        for row in range(len(query)):
            rotated = method.rotate(
                query[row : row + 1], key[row : row + 1], positions[row, places], positions[row]
            )
            queries.append(rotated[0])
            keys.append(rotated[1])
        return torch.cat(queries), torch.cat(keys)  # [b, h, s, d], [b, g, t, d]

    def _tables(self, query: Tensor, key: Tensor, span: Span) -> PositionTables:
        """The method's tables, with the jacobians that speed up the fused backend."""
        # A causal call has at most as many queries as keys.
        longest = key.shape[2]
        if not span.causal:
            longest = max(query.shape[2], longest)
        # torch.compile would trace the jacobians once for each length.
        with_jacobians = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if with_jacobians:
            with_jacobians = runs_fused(self.positional, self.backend, query, query.shape)
        # With a window or blocks, the tables end at the farthest key that a query sees.
        return position_tables(
            self.positional,
            span.max_kv_len(longest),
            query.device,
            causal=span.causal,
            with_jacobians=with_jacobians,
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    window: int | None = None,
    block: int | None = None,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention with tables of one's own: softmax(weight * q.k * scale + bias) v, `[b, h, s, v]`.

    Args:
        query: `[b, h, s, d]`. The queries are the last s of the t positions: query i is at position
            t - s + i.
        key, value: `[b, g, t, d]` and `[b, g, t, v]`. With g < h (grouped-query attention, arXiv
            2305.13245), query head i uses key/value head i // (h/g). Only uncompiled FlexAttention
            (see `flex.py`) repeats them in memory.
        bias_table, weight_table: float32 `[h, >= Span.max_kv_len(t)]` over distance (see `tables`).
            Their gradients are exact. The result is zero for a query whose biases are all -inf.
        window: a query attends to the last `window` keys, including its own position.
        block: a query attends to its own block of positions and to the previous one (see `Span`).
        document_ids: integers `[b, t]`, for several documents in a row: a query attends only to
            keys with its own number. Window, blocks and distances count the tokens of the document.
            Of padding, with negative numbers, only finite values are guaranteed. See
            `ids_of_sequences` for `cu_seqlens`.
        key_mask: bool `[b, t]`, True for the keys that take part, so padding is False. Positions
            count all keys. The result is zero for a query without a visible key.
        causal: if False, a query also attends to the keys after it. Tables are read at the absolute
            distance, unless they have a half for keys after the query (see `tables`), up to the
            larger of s and t. Queries and keys both begin at position 0, and without a window there
            may be more queries than keys. A window has `window` - 1 keys on both sides.
        dropout_p: probability of dropping an attention probability.
        scale: factor of q.k, positive and finite; 1 / sqrt(d) by default.
        backend: one of `backend_names()`.

    Raises ValueError for arguments that do not fit together or an unknown backend, and
    NotImplementedError for a backend that does not support the call.
    """
    # The caller's tables are all that is known of positions: there is no method, so nothing is
    # rotated.
    documents = None
    if document_ids is not None:
        documents = Documents(document_ids)
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=scale_or_default(scale, query),
        tables=PositionTables(bias=bias_table, weight=weight_table),
        span=Span(window, block, causal=causal),
        documents=documents,
        key_mask=key_mask,
        dropout_p=dropout_p,
    )
    return run(call, backend)


def scale_or_default(scale: float | None, query: Tensor) -> float:
    """The scale, by default 1 / sqrt(d)."""
    if scale is not None:
        return scale
    return float(query.shape[-1] ** -0.5)


def check_hooks(positional: PositionalMethod | None) -> None:
    """Raises ValueError for hooks that exclude each other, and TypeError unless it is a method."""
    if positional is None:
        return
    if not isinstance(positional, PositionalMethod):
        raise TypeError(
            "Attention's first argument is a positional method from kerple.positional, not "
            f"{positional!r}; a backend is the second one"
        )
    name = type(positional).__name__
    hooks = positional.hooks
    # `modify_scores` returns the scores as they enter the softmax, so there is no place for the
    # other hooks.
    if "modify_scores" in hooks and hooks & {"bias", "weight", "decay", "scale_qk"}:
        raise ValueError(
            f"{name} defines modify_scores, so it must not define bias, weight, decay or scale_qk "
            "too; compute the final scores in modify_scores, and scale queries and keys in rotate"
        )
    # Most backends compute a decay with additional dimensions of query and key, whose products a
    # weight would multiply.
    if "decay" in hooks and "weight" in hooks:
        raise ValueError(f"{name} defines decay, so it must not define weight too")
