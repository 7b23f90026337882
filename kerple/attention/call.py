"""A call of attention: its tensors, the keys that each query attends to, and whether they fit
together.

`attend`, `Attention`, the model's layers and exported models build an `AttentionCall`. `validate`
is the only place that decides whether a call is valid; backends rely on it.

In grouped-query attention (arXiv 2305.13245), h query heads share g key/value heads: query head i
uses key/value head i // (h/g).

Legend: b batch, s query length, t key length, h heads (of queries), g key/value heads, d head size,
v size of the value heads, p coefficients per head; c queries, l keys.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kerple.attention.documents import Documents
from kerple.attention.span import EVERY_KEY, FULL, Span
from kerple.attention.tables import NO_TABLES, PositionTables
from kerple.positional import Chunk, PositionalMethod

# (query, key, query positions, key positions, scale) -> scaled products, in the place of scale *
# q.k.
Products = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(kw_only=True, eq=False, slots=True)
class AttentionCall:
    """The arguments of one call of attention.

    Attributes:
        query: `[b, h, s, d]`, the last s of the t positions; the first s positions if the span is
            not causal. After the method's `rotate`.
        key: `[b, g, t, d]`; g divides h.
        value: `[b, g, t, v]`.
        scale: factor of q.k.
        method: the positional method, whose `scale_qk` and `modify_scores` apply; None for tables
            without a method.
        tables: over distance. With a method, those that it has.
        products: computes the products of queries and keys, or None for scale * q.k.
        decay_sums: `[b, h, t]`, the keys' prefix sums c (see `kerple.positional.decay_sums`), or
            None. The scores of query i and key j get the bias c_i - c_j.
        span: the keys that each query attends to.
        documents: those of the t tokens of each row, or None for one. Scores with `modify_scores`
            ignore them.
        key_mask: bool `[b, t]`, True for the keys that take part, or None for all. Positions count
            all keys.
        dropout_p: probability of dropping an attention probability.
        dropped: the position of the first key, if earlier ones are outside of the window of every
            query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    method: PositionalMethod | None = None
    tables: PositionTables = NO_TABLES
    products: Products | None = None
    decay_sums: Tensor | None = None
    span: Span = FULL
    documents: Documents | None = None
    key_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropped: int = 0

    # -- sizes and positions -----------------------------------------------------------------------

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
        if not self.span.causal:
            return 0
        return self.kv_len - self.q_len

    @property
    def max_kv_len(self) -> int:
        """The largest number of keys that a query attends to, on one side: the tables cover the
        distances below it.
        """
        # Causal calls have at most as many queries as keys. `max` would fix a length that
        # torch.compile does not know.
        length = self.kv_len
        if not self.span.causal:
            length = max(self.q_len, length)
        return self.span.max_kv_len(length)

    @property
    def is_plain(self) -> bool:
        """Whether every query sees every key up to its own, or every key, and there are as many
        queries as keys if that matters.
        """
        if self.span == EVERY_KEY:
            return True
        return self.span == FULL and self.q_len == self.kv_len

    # -- what the call has -------------------------------------------------------------------------

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks of the method; none without a method."""
        if self.method is None:
            return frozenset()
        return self.method.hooks

    @property
    def modify_scores(self) -> Callable[[Chunk], Tensor] | None:
        """The method's `final_scores`, which reads `tables.scores`, or None."""
        if self.method is None or "modify_scores" not in self.method.hooks:
            return None
        return self.method.final_scores

    @property
    def has_tables(self) -> bool:
        return self.tables.bias is not None or self.tables.weight is not None

    @property
    def has_pair_mask(self) -> bool:
        """Whether the span alone does not say which keys a query attends to."""
        return self.documents is not None or self.key_mask is not None

    @property
    def is_packed(self) -> bool:
        """Whether the fused kernels can compute all documents at once: each is a range of queries
        and keys, whose mask is causal or a window. False in compiled code, because it waits for the
        ids.
        """
        # Nothing to pack, or its ids cannot be read.
        if torch.compiler.is_compiling() or self.documents is None:
            return False
        # The kernels compute neither blocks, nor keys after the query, nor a method's own scores.
        if not self.span.causal or self.span.block is not None or "modify_scores" in self.hooks:
            return False
        # Each document must be one range, with a query for each key.
        return self.q_len == self.kv_len and self.documents.ranges is not None

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of scores and probabilities: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def training(self) -> bool:
        """Whether gradients are required."""
        if not torch.is_grad_enabled():
            return False
        if self.query.requires_grad or self.key.requires_grad or self.value.requires_grad:
            return True
        for optional in (self.tables.bias, self.tables.weight, self.decay_sums):
            if optional is not None and optional.requires_grad:
                return True
        return False

    @property
    def kind(self) -> Hashable:
        """What the choice of a backend depends on, for a call without documents."""
        tables = self.tables
        query = self.query
        span = self.span
        # Of a jacobian, only the number of coefficients and its dense part matter to the kernels.
        directions = []
        for jacobian in (tables.bias_jacobian, tables.weight_jacobian):
            if jacobian is not None:
                directions.append((jacobian.coefficients.shape[1], jacobian.dense))
        return (
            # The states, and the keys that a query attends to.
            query.shape,
            self.key.shape,
            self.value.shape,
            query.dtype,
            query.device,
            span.window,
            span.block,
            span.causal,
            # The other arguments.
            self.training,
            self.method,
            self.dropout_p > 0,
            tuple(directions),
            tables.bias is None,
            tables.weight is None,
            self.decay_sums is None,
            self.key_mask is None,
            self.products is None,
        )

    # -- parts of the call -------------------------------------------------------------------------

    def part(self, queries: slice, keys: slice) -> "AttentionCall":
        """This call, without documents, for some of its queries and keys."""
        decay_sums = self.decay_sums
        key_mask = self.key_mask
        if decay_sums is not None:
            decay_sums = decay_sums[..., keys]
        if key_mask is not None:
            key_mask = key_mask[:, keys]
        return replace(
            self,
            query=self.query[:, :, queries],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            decay_sums=decay_sums,
            key_mask=key_mask,
        )

    def keys(self, queries: slice) -> slice:
        """The keys that the queries at these positions may attend to."""
        # Documents are anywhere in the row, so their windows say nothing about it.
        window = None
        first = 0
        if self.documents is None:
            window = self.span.window
            first = self.span.first_key(queries.start)
        # Up to the last of the queries; otherwise, as far after it as the window reaches.
        if self.span.causal:
            return slice(first, queries.stop)
        if window is None:
            return slice(first, self.kv_len)
        return slice(first, min(self.kv_len, queries.stop - 1 + window))

    def mask(self, queries: slice, keys: slice) -> Tensor:
        """Bool `[c, l]`, or `[b, 1, c, l]` with documents or a key mask. True = masked."""
        if self.documents is None:
            mask = self.span.mask(queries, keys, self.query.device)  # [c, l]
        else:
            # The span counts positions within a document; keys of other documents are masked, too.
            ids = self.documents.ids
            positions = self.documents.positions
            places = self.documents.places(queries, self.offset)
            mask = self.span.mask_pairs(positions[:, places, None], positions[:, None, keys])
            is_other = ids[:, places, None] != ids[:, None, keys]  # [b, c, l]
            mask = (mask | is_other)[:, None]  # [b, 1, c, l]
        if self.key_mask is None:
            return mask
        return mask | ~self.key_mask[:, None, None, keys]

    def distances(self, queries: slice, keys: slice) -> Tensor:
        """Int64 `[c, l]` for positions, and `[b, c, l]` with documents; limited to those in the
        tables, so that masked pairs have an entry too.
        """
        if self.documents is None:
            device = self.query.device
            query = torch.arange(queries.start, queries.stop, device=device)[:, None]  # [c, 1]
            key = torch.arange(keys.start, keys.stop, device=device)  # [l]
        else:
            positions = self.documents.positions
            places = self.documents.places(queries, self.offset)
            query = positions[:, places, None]  # [b, c, 1]
            key = positions[:, None, keys]  # [b, 1, l]
        farthest = self.max_kv_len - 1
        nearest = -farthest
        if self.span.causal:
            nearest = 0
        return (query - key).clamp_(nearest, farthest)

    # -- validity ----------------------------------------------------------------------------------

    def validate(self) -> "AttentionCall":
        """Return the call itself. Raises ValueError for arguments that do not fit together.

        Every layer of every step calls this, so valid arguments cost a few comparisons.
        """
        # The states, masks and positions.
        check_shapes(self.query, self.key, self.value)
        check_states(self)

        # What the positional method adds to them.
        tables = self.tables
        if not isinstance(tables, PositionTables):
            raise ValueError(
                f"tables of type {type(tables).__name__} must be PositionTables: pass "
                "tables=position_tables(method, length, device), or use attend(bias_table=...)"
            )
        if self.decay_sums is not None:
            check_decay(self, self.decay_sums)
        if self.method is not None:
            check_method(self, self.method)

        # Tables without a value have nothing to check.
        if tables is not NO_TABLES:
            check_tables(self)
        return self


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raises ValueError unless the shapes are those of queries, keys and values of attention."""
    q = query.shape
    k = key.shape
    v = value.shape
    four = len(q) == len(k) == len(v) == 4
    fits = four and k[:3] == v[:3] and q[0] == k[0] and q[3] == k[3]
    if not fits or not k[1] or q[1] % k[1]:
        raise ValueError(
            f"query {list(q)}, key {list(k)} and value {list(v)} do not fit together: they must be "
            "[b, h, s, d], [b, g, t, d] and [b, g, t, v], where g divides h; for one sample, add a "
            "dimension with query[None]"
        )


def check_states(call: AttentionCall) -> None:
    """Raises ValueError for dtypes, lengths, masks, a scale or a dropout probability that do not
    fit.
    """
    query = call.query
    span = call.span
    documents = call.documents
    dtype = query.dtype
    batch = query.shape[0]
    if not dtype == call.key.dtype == call.value.dtype:
        raise ValueError(
            f"query, key and value differ in dtype: {dtype}, {call.key.dtype}, {call.value.dtype}"
        )
    if not dtype.is_floating_point:
        raise ValueError(f"query, key and value are {dtype}; they must be floating-point")

    # Positions. Only queries that see every key need no positions of their own.
    q_len = call.q_len
    kv_len = call.kv_len
    causal = span.causal
    has_positions = causal or span.window is not None
    if not q_len or not kv_len or (has_positions and q_len > kv_len):
        raise ValueError(
            f"{q_len} queries for {kv_len} keys: the queries are the last positions of the keys, "
            f"so there must be 1 to {kv_len}; only attention with causal=False and no window can "
            "have more"
        )
    if documents is not None:
        check_documents(documents, batch, q_len, kv_len, causal)
    if span.sinks:
        raise ValueError(f"{span}: only attend_in_mode computes sinks")
    if call.dropped and (documents is not None or not causal):
        raise ValueError(
            "dropped must be 0 with documents or causal=False, which have positions of their own"
        )
    if span.block is not None and call.dropped % span.block:
        raise ValueError(
            f"block {span.block}: the first key is at position {call.dropped}, inside a block; "
            "pass the keys from the start of a block on"
        )

    # Scale, dropout and masks.
    if not 0.0 < call.scale < math.inf:
        raise ValueError(f"scale must be positive and finite; got {call.scale}")
    if not 0.0 <= call.dropout_p < 1.0:
        raise ValueError(f"dropout_p must be at least 0 and below 1; got {call.dropout_p}")
    mask = call.key_mask
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, kv_len)):
        raise ValueError(
            f"key_mask {mask.dtype} {list(mask.shape)} must be bool {[batch, kv_len]}, True for "
            "the keys that take part"
        )


def check_documents(
    documents: Documents, batch: int, q_len: int, kv_len: int, causal: bool
) -> None:
    """Raises ValueError unless they are the documents of the keys, with places of queries."""
    shape = documents.ids.shape
    if shape != (batch, kv_len):
        raise ValueError(
            f"document_ids {list(shape)} must be {[batch, kv_len]}: each key's document"
        )
    if not causal and q_len != kv_len:
        raise ValueError("causal=False: document_ids need as many queries as keys")


def check_decay(call: AttentionCall, sums: Tensor) -> None:
    """Raises ValueError unless decay sums have a number per head and key, and fit the scores."""
    batch, heads, _, _ = call.query.shape
    expected = (batch, heads, call.kv_len)
    if not call.span.causal:
        raise ValueError("causal=False: decay_sums need causal attention")
    if sums.shape != expected:
        raise ValueError(
            f"decay_sums {list(sums.shape)} must be {list(expected)}, for each head and key"
        )
    if call.tables.weight is not None or "modify_scores" in call.hooks:
        raise ValueError("decay_sums cannot be combined with weight_table or modify_scores")


def check_method(call: AttentionCall, method: PositionalMethod) -> None:
    """Raises ValueError unless tables and decay sums fit the call's method and direction."""
    hooks = method.hooks
    tables = call.tables
    causal = call.span.causal
    name = type(method).__name__
    if not causal and method.causal_only:
        raise ValueError(
            f"{name} is defined only for causal attention; with causal=False, use a method that is "
            "a function of the distance, such as kerple_log, rotary, rpe or fire"
        )

    # The tables that the method has, for this direction.
    for table_name, table in (("bias", tables.bias), ("weight", tables.weight)):
        if (table is None) == (table_name in hooks):
            problem = "has none"
            if table is None:
                problem = "needs one"
            raise ValueError(
                f"tables.{table_name} does not fit: {name} {problem}; pass "
                "tables=position_tables(method, length, device)"
            )
    if tables.signed != (method.signed and not causal):
        raise ValueError(
            f"the tables of {name} depend on the direction: pass "
            f"tables=position_tables(method, length, device, causal={causal})"
        )

    # The decay and the scores that the method has.
    if "decay" in hooks and call.decay_sums is None:
        raise ValueError(f"{name} has a decay: pass decay_sums=decay_sums(method.decay(hidden))")
    if "decay" not in hooks and call.decay_sums is not None:
        raise ValueError(f"decay_sums were passed, but {name} has no decay")
    if "modify_scores" in hooks and tables.scores is None:
        origin = torch.zeros(1, device=call.query.device)
        if method.table(origin) is not None:
            raise ValueError(
                f"{name} has a table for modify_scores: pass tables=position_tables(method, "
                f"{call.max_kv_len}, device)"
            )


def check_tables(call: AttentionCall) -> None:
    """Raises ValueError for tables that do not cover the heads and distances of the call."""
    tables = call.tables
    heads = call.query.shape[1]
    length = call.max_kv_len
    for name, table, jacobian in (
        ("bias", tables.bias, tables.bias_jacobian),
        ("weight", tables.weight, tables.weight_jacobian),
    ):
        # A row per head and a column per distance; with causal=False, there may be two halves.
        # A transposed query and a bias per pair are common mistakes, so their errors say so.
        if table is not None:
            shape = table.shape
            is_halves = len(shape) == 3 and shape[0] == 2 and not call.span.causal
            fits = len(shape) == 2 or is_halves
            is_per_pair = len(shape) == 3 and shape[0] == heads
            if fits and not is_per_pair and shape[-2] != heads and shape[-2] == call.q_len:
                raise ValueError(
                    f"query {list(call.query.shape)} seems to be [b, s, h, d], because the tables "
                    f"have {shape[-2]} heads; pass query.transpose(1, 2), and the same for key and "
                    "value"
                )
            if not fits or shape[-2] != heads or shape[-1] < length:
                raise ValueError(
                    f"{name}_table {list(shape)} must be [{heads}, at least {length}]: a value per "
                    "head and distance, not per pair of query and key"
                )
        if jacobian is None:
            continue

        # A direction per coefficient, and a column per distance.
        coefficients = jacobian.coefficients.shape
        directions = jacobian.directions.shape
        fits = coefficients[:1] == (heads,) and directions[:-1] == coefficients
        if not fits or directions[-1] < length:
            raise ValueError(
                f"{name}_jacobian has coefficients {list(coefficients)} and directions "
                f"{list(directions)}; they must be [{heads}, p] and [{heads}, p, at least {length}]"
            )
    if tables.scores is not None and tables.scores.shape[-1] < length:
        raise ValueError(
            f"table {list(tables.scores.shape)} must be [..., at least {length}]: pass "
            f"score_table(method, {length}, device)"
        )
