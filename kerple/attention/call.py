"""A call of attention: its tensors, the keys that each query attends to, and what it requires of a backend.

In grouped-query attention (arXiv 2305.13245), h query heads share g key/value heads: query head i uses key/value head
i // (h/g).

Legend: b batch, s query length, t key length, h heads (of queries), g key/value heads, d head size, v size of the value
heads, p coefficients per head; c queries, l keys.
"""

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kerple.attention.tables import NO_TABLES, Documents, PositionTables
from kerple.positional import Chunk, PositionalMethod, append_decay

# A positional method's `final_scores`.
ModifyScores = Callable[[Chunk], Tensor]
# (query, key, query positions, key positions, scale) -> scaled products, in the place of scale * q.k.
Products = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class Span:
    """The keys that a query attends to: all keys up to its own position, unless `window` or `block` limits them.

    Raises ValueError if both are set, if a size is below 1, for sinks without a window, and for blocks or sinks that
    are not causal.

    Attributes:
        window: the last `window` keys, including its own position.
        block: positions are divided into blocks of this size, starting at position 0. A query attends to its own block
            and to the previous one (blockwise causal attention of LEX, arXiv 2212.10554).
        sinks: with a window, a query also attends to the first `sinks` positions of the text (StreamingLLM, arXiv
            2309.17453; LM-Infinite, arXiv 2308.16137). Only `attend_in_mode` supports them.
        causal: if False, a query also attends to the keys after it. A window then has `window` - 1 keys on both sides.
    """

    window: int | None = None
    block: int | None = None
    sinks: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.block is not None:
            raise ValueError(f"window ({self.window}) and block ({self.block}) are both set; use one of them")
        for name, size in (("window", self.window), ("block", self.block)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, since a query attends to its own position; got {size}")
        if self.sinks < 0 or (self.sinks and self.window is None):
            raise ValueError(f"sinks {self.sinks} must be 0 or more, and sinks need a window")
        if not self.causal and (self.block is not None or self.sinks):
            raise ValueError("block and sinks need causal attention; with causal=False, use a window")

    def within(self, window: int | None) -> "Span":
        """This span, limited to the last `window` keys; None: no limit. Raises ValueError with blocks."""
        if window is None or (self.window is not None and self.window <= window):
            return self
        return replace(self, window=window)

    def max_kv_len(self, length: int) -> int:
        """The largest number of keys up to its own position that any of `length` queries attends to."""
        limit = self.window if self.block is None else 2 * self.block
        return length if limit is None else min(length, limit + self.sinks)

    def first_key(self, position: Position) -> Position:
        """The first key position that the query at `position` attends to, without sinks; elementwise for a tensor."""
        if self.block is not None:
            first = (position // self.block - 1) * self.block
        elif self.window is not None:
            first = position - self.window + 1
        else:
            first = 0 * position
        return first.clamp(min=0) if isinstance(first, Tensor) else max(0, first)

    def mask(self, queries: range, keys: range, device: torch.device | str) -> Tensor:
        """Bool `[queries, keys]` for ranges of positions. True = masked: the query does not attend to the key.

        The mask is built on `device`. A copy from the CPU would synchronize the host with the device.
        """
        start = min(queries.start, keys.start)
        positions = torch.arange(start, max(queries.stop, keys.stop), device=device)
        query = positions[queries.start - start : queries.stop - start, None]
        return self.mask_pairs(query, positions[keys.start - start : keys.stop - start])

    def mask_pairs(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether keys are masked, for positions of queries and keys that can be broadcast to each other."""
        if not self.causal:
            distance = (query - key).abs_()
            return torch.zeros_like(distance, dtype=torch.bool) if self.window is None else distance >= self.window
        mask = key > query
        return mask if self == FULL else mask | ((key < self.first_key(query)) & (key >= self.sinks))


FULL = Span()
EVERY_KEY = Span(causal=False)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a call requires of a backend. None means unknown, for checks before the tensors exist.

    Attributes:
        causal: queries do not attend to the keys after them.
        modify_scores: the positional method computes the final scores, or the products.
        key_mask: some keys take no part.
        training: gradients are required.
        head_size, value_size, batch_heads: d, v and b * h.
    """

    causal: bool = True
    weight: bool = False
    modify_scores: bool = False
    decay: bool = False
    key_mask: bool = False
    dropout: bool = False
    training: bool = False
    dtype: torch.dtype | None = None
    head_size: int | None = None
    value_size: int | None = None
    batch_heads: int | None = None
    device: torch.device | None = None

    @classmethod
    def of(cls, *methods: PositionalMethod, **others: Any) -> "Requirements":
        """Those of positional methods, and others."""
        hooks = {hook for method in methods for hook in method.hooks}
        weight, modify_scores, decay = (name in hooks for name in ("weight", "modify_scores", "decay"))
        return cls(weight=weight, modify_scores=modify_scores, decay=decay, **others)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """The arguments of one call of `attend`. `dispatch` validates them once; backends rely on them.

    Attributes:
        query: `[b, h, s, d]`, the last s of the t positions; the first s positions if the span is not causal.
        key: `[b, g, t, d]`; g divides h.
        value: `[b, g, t, v]`.
        scale: factor of q.k.
        tables: a positional method's tables over distance.
        modify_scores: a positional method's `final_scores`, which reads `tables.scores`, or None.
        products: computes the products of queries and keys, or None for scale * q.k.
        decay_sums: `[b, h, t]`, the keys' prefix sums c (see `kerple.positional.decay_sums`), or None. The scores of
            query i and key j get the bias c_i - c_j.
        span: the keys that each query attends to.
        documents: those of the t tokens of each row, or None for one. Scores with `modify_scores` ignore them.
        key_mask: bool `[b, t]`, True for the keys that take part, or None for all. Positions count all keys.
        dropout_p: probability of dropping an attention probability.
        dropped: the position of the first key, for `modify_scores` and scaled queries and keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    tables: PositionTables = NO_TABLES
    modify_scores: ModifyScores | None = None
    products: Products | None = None
    decay_sums: Tensor | None = None
    span: Span = FULL
    documents: Documents | None = None
    key_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropped: int = 0

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    @property
    def context_shape(self) -> tuple[int, ...]:
        """`[b, h, s, v]`, the shape of the result."""
        return (*self.query.shape[:3], self.value.shape[3])

    @property
    def kv_heads(self) -> int:
        """g, the number of key/value heads."""
        return self.key.shape[1]

    @property
    def queries_per_kv(self) -> int:
        """h / g, the number of query heads that share a key/value head."""
        return self.query.shape[1] // self.kv_heads

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return self.kv_len - self.q_len if self.span.causal else 0

    @property
    def max_kv_len(self) -> int:
        """The largest number of keys that a query attends to, on one side: the tables cover the distances below it."""
        return self.span.max_kv_len(max(self.q_len, self.kv_len))

    def keys(self, queries: range) -> range:
        """The keys that queries at these positions may attend to."""
        window = self.span.window if self.documents is None else None
        first = 0 if self.documents is not None else self.span.first_key(queries.start)
        if self.span.causal:
            return range(first, queries.stop)
        return range(first, self.kv_len if window is None else min(self.kv_len, queries.stop - 1 + window))

    def part(self, queries: slice, keys: slice) -> "AttentionCall":
        """This call, without documents, for some of its queries and keys."""
        return replace(
            self,
            query=self.query[:, :, queries],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            decay_sums=None if self.decay_sums is None else self.decay_sums[..., keys],
            key_mask=None if self.key_mask is None else self.key_mask[:, keys],
        )

    def mask(self, queries: range, keys: range) -> Tensor:
        """Bool `[c, l]` for ranges of positions, and `[b, 1, c, l]` with documents or a key mask. True = masked."""
        key = slice(keys.start, keys.stop)
        if self.documents is None:
            mask = self.span.mask(queries, keys, self.query.device)
        else:
            ids, positions = self.documents.ids, self.documents.positions
            query = self.documents.places(queries, self.offset)
            mask = self.span.mask_pairs(positions[:, query, None], positions[:, None, key])
            mask = (mask | (ids[:, query, None] != ids[:, None, key]))[:, None]
        return mask if self.key_mask is None else mask | ~self.key_mask[:, None, None, key]

    def distances(self, queries: range, keys: range) -> Tensor:
        """Int64 `[c, l]` for ranges of positions, and `[b, c, l]` with documents; limited to those in the tables, so
        that masked pairs have an entry too.
        """
        if self.documents is None:
            query = torch.arange(queries.start, queries.stop, device=self.query.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=self.query.device)
        else:
            positions, places = self.documents.positions, self.documents.places(queries, self.offset)
            query, key = positions[:, places, None], positions[:, None, keys.start : keys.stop]
        farthest = self.max_kv_len - 1
        return (query - key).clamp_(0 if self.span.causal else -farthest, farthest)

    @property
    def has_pair_mask(self) -> bool:
        """Whether the span alone does not say which keys a query attends to."""
        return self.documents is not None or self.key_mask is not None

    @property
    def is_packed(self) -> bool:
        """Whether the fused kernels can compute all documents at once: each is a range of queries and keys, whose mask
        is causal or a window. False in compiled code, because it waits for the ids.
        """
        if torch.compiler.is_compiling():
            return False
        simple = self.span.causal and self.span.block is None and self.modify_scores is None
        return simple and self.q_len == self.kv_len and self.documents is not None and self.documents.ranges is not None

    @property
    def has_tables(self) -> bool:
        return self.tables.bias is not None or self.tables.weight is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of scores and probabilities: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that may require gradients."""
        tensors = (self.query, self.key, self.value, self.tables.bias, self.tables.weight, self.decay_sums)
        return [tensor for tensor in tensors if tensor is not None]

    @property
    def training(self) -> bool:
        """Whether gradients are required."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)

    @property
    def requirements(self) -> Requirements:
        batch, heads, _, head_size = self.query.shape
        return Requirements(
            causal=self.span.causal,
            weight=self.tables.weight is not None,
            modify_scores=self.modify_scores is not None or self.products is not None,
            decay=self.decay_sums is not None,
            key_mask=self.key_mask is not None,
            dropout=self.dropout_p > 0,
            training=self.training,
            dtype=self.query.dtype,
            head_size=head_size,
            value_size=self.value.shape[3],
            batch_heads=batch * heads,
            device=self.query.device,
        )

    @property
    def kind(self) -> Hashable:
        """What `validate` and the choice of a backend depend on: equal for calls that need no other decision."""
        query, key, value, tables = self.query, self.key, self.value, self.tables
        ids = None if self.documents is None else self.documents.ids
        optional = [tables.bias, tables.weight, self.decay_sums, tables.scores, ids, self.key_mask]
        for jacobian in (tables.bias_jacobian, tables.weight_jacobian):
            optional += [None, None] if jacobian is None else [jacobian.coefficients, jacobian.directions]
        return (
            *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device),
            *[getattr(tensor, "shape", None) for tensor in optional],
            *(self.training, self.span, self.scale, self.dropout_p),
            None if self.key_mask is None else self.key_mask.dtype,
        )

    def validate(self) -> "AttentionCall":
        """Return the call itself. Raises ValueError for shapes, dtypes or a dropout probability that do not fit."""
        # Shapes and dtypes. The tables tell a transposed query.
        query = list(self.query.shape)
        rows = {table.shape[-2] for table in (self.tables.bias, self.tables.weight) if table is not None}
        if len(query) == 4 and rows == {query[2]} != {query[1]}:
            raise ValueError(
                f"query {query} seems to be [b, s, h, d], because the tables have {query[2]} heads; pass "
                "query.transpose(1, 2), and the same for key and value"
            )
        check_shapes(self.query, self.key, self.value)
        if not self.query.dtype == self.key.dtype == self.value.dtype:
            raise ValueError(
                f"query, key and value differ in dtype: {self.query.dtype}, {self.key.dtype}, {self.value.dtype}"
            )
        heads, per_key = query[1], [query[0], self.kv_len]

        # Positions, dropout, documents and masked keys.
        if not self.q_len or not self.kv_len or (self.span != EVERY_KEY and self.q_len > self.kv_len):
            raise ValueError(
                f"{self.q_len} queries for {self.kv_len} keys: the queries are the last positions of the keys, so "
                f"there must be 1 to {self.kv_len}; only attention with causal=False and no window can have more"
            )
        if not self.span.causal and (self.decay_sums is not None or (self.documents and self.q_len != self.kv_len)):
            raise ValueError("causal=False: decay_sums need causal attention, and document_ids as many queries as keys")
        if not 0.0 <= self.dropout_p < 1.0:
            raise ValueError(f"dropout_p must be at least 0 and below 1; got {self.dropout_p}")
        if self.documents is not None and list(self.documents.ids.shape) != per_key:
            raise ValueError(f"document_ids {list(self.documents.ids.shape)} must be {per_key}: each key's document")
        if self.key_mask is not None and (self.key_mask.dtype != torch.bool or list(self.key_mask.shape) != per_key):
            raise ValueError(
                f"key_mask {self.key_mask.dtype} {list(self.key_mask.shape)} must be bool {per_key}, True for the keys "
                "that take part"
            )

        # Tables have a row per head and a column per distance, with causal=False twice.
        tables = self.tables
        for name, table in (("bias", tables.bias), ("weight", tables.weight)):
            if table is None:
                continue
            halves = list(table.shape[:-2])
            fits = table.shape[-2] == heads and table.shape[-1] >= self.max_kv_len
            if not fits or halves not in ([], [2]) or (halves and self.span.causal):
                raise ValueError(f"{name}_table {list(table.shape)} must be [{heads}, at least {self.max_kv_len}]")
        if tables.scores is not None and tables.scores.shape[-1] < self.max_kv_len:
            raise ValueError(
                f"table {list(tables.scores.shape)} must be [..., at least {self.max_kv_len}]: pass "
                f"score_table(method, {self.max_kv_len}, device)"
            )

        # The decay.
        if self.decay_sums is not None:
            expected = [query[0], heads, self.kv_len]
            if list(self.decay_sums.shape) != expected:
                raise ValueError(f"decay_sums {list(self.decay_sums.shape)} must be {expected}, for each head and key")
            if tables.weight is not None or self.modify_scores is not None or self.scale == 0.0:
                raise ValueError("decay_sums cannot be combined with weight_table, modify_scores or a scale of 0")

        # The tables' gradients.
        for name, jacobian in (("bias", tables.bias_jacobian), ("weight", tables.weight_jacobian)):
            if jacobian is None:
                continue
            coefficients, directions = list(jacobian.coefficients.shape), list(jacobian.directions.shape)
            if coefficients[:1] != [heads] or directions[:-1] != coefficients or directions[-1] < self.max_kv_len:
                raise ValueError(
                    f"{name}_jacobian has coefficients {coefficients} and directions {directions}; they must be "
                    f"[{heads}, p] and [{heads}, p, at least {self.max_kv_len}]"
                )
        return self


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless the shapes are those of queries, keys and values of attention."""
    q, k, v = list(query.shape), list(key.shape), list(value.shape)
    fits = len(q) == len(k) == len(v) == 4 and k[:3] == v[:3] and (q[0], q[3]) == (k[0], k[3])
    if not fits or not k[1] or q[1] % k[1]:
        raise ValueError(
            f"query {q}, key {k} and value {v} do not fit together: they must be [b, h, s, d], [b, g, t, d] and "
            "[b, g, t, v], where g divides h; for one sample, add a dimension with query[None]"
        )


@dataclass(frozen=True)
class Backend:
    """An implementation of attention, and what it supports.

    Attributes:
        name: its `attention-backend` name.
        run: computes a validated call that the backend supports.
        noncausal: whether it computes attention that is not causal.
        weight, modify_scores, dropout, key_mask: see `Requirements`.
        value_sizes: whether v may differ from d.
        decay: whether `run` computes the bias of `decay_sums`; for other backends, it becomes part of query and key.
        masks_documents: whether a mask separates the documents of a call (True), or each has calls of its own (False);
            None: masks for fewer queries than keys and in compiled code. The fused kernels read only the documents' own
            keys if the call `is_packed`.
        training_on_cpu: whether it computes gradients on a CPU.
        dtypes: supported dtypes of query, key and value; None: all.
        max_head_size, max_batch_heads: largest supported d and b * h; None: no limit.
        unavailable_reason: why the backend cannot run a call on its device, or None if it can. The device is known.
    """

    name: str
    run: Callable[[AttentionCall], Tensor]
    noncausal: bool = True
    weight: bool = True
    modify_scores: bool = False
    dropout: bool = True
    key_mask: bool = True
    value_sizes: bool = True
    decay: bool = False
    masks_documents: bool | None = None
    training_on_cpu: bool = True
    dtypes: tuple[torch.dtype, ...] | None = None
    max_head_size: int | None = None
    max_batch_heads: int | None = None
    unavailable_reason: Callable[[Requirements], str | None] = lambda requirements: None

    def compute(self, call: AttentionCall) -> Tensor:
        """Run a validated call that the backend supports."""
        with without_autocast(call.query.device):
            sums = None if self.decay else call.decay_sums
            return self.run(call) if sums is None else self._with_decay(call, sums)

    def _with_decay(self, call: AttentionCall, decay_sums: Tensor) -> Tensor:
        # Only differences of the sums matter. Those to the sum of the middle query (in decoding, of the only one) are
        # small for the keys near it, so that products in float32 do not lose them.
        sums = decay_sums - decay_sums[..., -1 - call.q_len // 2, None].detach()
        query, key, value = call.query, call.key, call.value
        if torch.is_grad_enabled() and sums.requires_grad and call.query.dtype.itemsize == 2:
            # The gradient of a decay is a sum of the gradients of all later sums, and of rounding errors in half
            # precision mostly these would remain.
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = append_decay(query, key, value, sums, call.scale)
        context = self.run(replace(call, query=query, key=key, value=value, decay_sums=None))
        return context[..., : call.value.shape[3]].to(call.query.dtype)

    def unsupported_reason(self, requirements: Requirements) -> str | None:
        """Why this backend cannot run such a call, as the rest of a sentence about it; None if it can."""
        dtype, head_size, batch_heads = requirements.dtype, requirements.head_size, requirements.batch_heads
        on_cpu = requirements.device is not None and requirements.device.type == "cpu"
        if not requirements.causal and not self.noncausal:
            return "computes only causal attention"
        if requirements.weight and not self.weight:
            return "cannot multiply scores by a weight, which this positional method needs"
        if requirements.modify_scores and not self.modify_scores:
            return "does not support positional methods with modify_scores"
        if requirements.dropout and not self.dropout:
            return "does not support attention dropout"
        if requirements.key_mask and not self.key_mask:
            return "does not support a key mask; document_ids can mark padding"
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return f"supports {', '.join(map(str, self.dtypes))}, not {dtype}"
        if head_size is not None and self.max_head_size is not None and head_size > self.max_head_size:
            return f"supports head sizes up to {self.max_head_size}, not {head_size}"
        if not self.value_sizes and requirements.value_size not in (None, head_size):
            return f"supports value heads of the size of key heads, {head_size}, not {requirements.value_size}"
        if batch_heads is not None and self.max_batch_heads is not None and batch_heads > self.max_batch_heads:
            return f"supports up to {self.max_batch_heads} for batch size times heads, not {batch_heads}"
        if requirements.training and on_cpu and not self.training_on_cpu:
            return "cannot compute gradients on a CPU"
        return None if requirements.device is None else self.unavailable_reason(requirements)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable autocast, which would compute the matrix products of scores in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
