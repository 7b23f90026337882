"""The entry point of attention: `attend`, `Attention` for a positional method, and the choice of the backend.

Legend: b batch, s query length, t key length, h heads, g key/value heads, d head size, v size of the value heads.
"""

import itertools
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kerple.attention import parts, self_check
from kerple.attention.backends.chunk_plan import modify_budget
from kerple.attention.backends.chunked import CHUNKED
from kerple.attention.backends.flex import FLEX
from kerple.attention.backends.reference import REFERENCE
from kerple.attention.backends.sdpa import SDPA
from kerple.attention.backends.triton.operator import FUSED
from kerple.attention.call import (
    EVERY_KEY,
    FULL,
    AttentionCall,
    Backend,
    ModifyScores,
    Requirements,
    Span,
    check_shapes,
)
from kerple.attention.tables import Documents, PositionTables, position_tables
from kerple.positional import PositionalMethod, TableJacobian

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (REFERENCE, SDPA, CHUNKED, FLEX, FUSED)}
# Kinds of calls whose backend an `Attention` remembers.
MAX_KINDS = 256


def backend_names() -> tuple[str, ...]:
    """The values of `attention-backend`."""
    return ("auto", *BACKENDS)


def check_backend(backend: str, requirements: Requirements) -> None:
    """Check that a backend supports calls with these requirements; `auto` supports all of them.

    Raises ValueError for an unknown name and NotImplementedError for a backend that does not support them.
    """
    if backend not in backend_names():
        raise ValueError(f"attention-backend {backend!r} is unknown; choose one of {', '.join(backend_names())}")
    if backend == "auto":
        return
    reason = _unsupported_reason(backend, requirements)
    if reason is not None:
        supported = [name for name in BACKENDS if _unsupported_reason(name, requirements) is None]
        raise NotImplementedError(f"attention-backend {backend!r} {reason}; use auto, or one of {', '.join(supported)}")


def _unsupported_reason(backend: str, requirements: Requirements) -> str | None:
    """Like `Backend.unsupported_reason`, but also excludes kernels that failed their self-check."""
    reason = BACKENDS[backend].unsupported_reason(requirements)
    return self_check.failure(requirements) if reason is None and backend == "fused" else reason


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    modify_scores: ModifyScores | None = None,
    table: Tensor | None = None,
    decay_sums: Tensor | None = None,
    window: int | None = None,
    block: int | None = None,
    document_ids: Tensor | None = None,
    key_mask: Tensor | None = None,
    causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    bias_jacobian: TableJacobian | None = None,
    weight_jacobian: TableJacobian | None = None,
) -> Tensor:
    """Attention softmax(weight * q.k * scale + bias) v, `[b, h, s, v]`.

    Args:
        query: `[b, h, s, d]`. The queries are the last s of the t positions: query i is at position t - s + i.
        key, value: `[b, g, t, d]` and `[b, g, t, v]`. With g < h (grouped-query attention, arXiv 2305.13245), query
            head i uses key/value head i // (h/g). Only uncompiled FlexAttention (see `flex.py`) repeats them in memory.
        bias_table, weight_table: float32 `[h, >= Span.max_kv_len(t)]` over distance (see `tables`). Their gradients
            are exact.
        modify_scores: computes the final scores: a positional method's `final_scores`. It replaces bias and weight.
        table: what `modify_scores` needs for the distances below `Span.max_kv_len(t)` (see `score_table`).
        decay_sums: `[b, h, t]`, prefix sums c of a method's `decay` (see `kerple.positional.decay_sums`): the scores of
            query i and key j get the bias c_i - c_j, in addition to `bias_table`. Without weight and modify_scores.
        window: a query attends to the last `window` keys, including its own position.
        block: a query attends to its own block of positions and to the previous one (see `Span`).
        document_ids: integers `[b, t]`, for several documents in a row: a query attends only to keys with its own
            number. Window, blocks and distances count the tokens of the document. Of padding, with negative numbers,
            only finite values are guaranteed. See `ids_of_sequences` for `cu_seqlens`.
        key_mask: bool `[b, t]`, True for the keys that take part, so padding is False. Positions count all keys. The
            result is zero for a query without a visible key.
        causal: if False, a query also attends to the keys after it. Tables are read at the absolute distance, unless
            they have a half for keys after the query (see `tables`), up to the larger of s and t. Queries and keys both
            begin at position 0, and without a window there may be more queries than keys. A window has `window` - 1
            keys on both sides.
        dropout_p: probability of dropping an attention probability.
        scale: factor of q.k, 1 / sqrt(d) by default.
        backend: one of `backend_names()`.
        bias_jacobian, weight_jacobian: alternative gradients of the tables (see `jacobians`). A backend that uses one
            computes the table's own gradient only for distances below `TableJacobian.dense`.

    Raises ValueError for arguments that do not fit together or an unknown backend, and NotImplementedError for a
    backend that does not support the call.
    """
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        tables=PositionTables(
            bias=bias_table,
            weight=weight_table,
            bias_jacobian=bias_jacobian,
            weight_jacobian=weight_jacobian,
            scores=table,
        ),
        modify_scores=modify_scores,
        decay_sums=decay_sums,
        span=Span(window, block, causal=causal),
        documents=None if document_ids is None else Documents(document_ids),
        key_mask=key_mask,
        dropout_p=dropout_p,
    )
    return _run(call.validate(), backend)


def _run(call: AttentionCall, backend: str, method: PositionalMethod | None = None) -> Tensor:
    """Run a validated call. method: its `scale_qk` applies."""

    def compute(part: AttentionCall) -> Tensor:
        return BACKENDS[_checked_choice(part, backend)].compute(part)

    masks = BACKENDS[backend].masks_documents if backend in BACKENDS else None
    if call.documents is not None and _choose(call, call.requirements, backend) == "fused" and call.is_packed:
        masks = True
    return parts.run(call, compute, method=method, masks_documents=masks)


def _checked_choice(call: AttentionCall, backend: str) -> str:
    """The backend for a validated call, after the self-check of its kernels."""
    requirements = call.requirements
    chosen = _choose(call, requirements, backend)
    check_backend(chosen, requirements)
    if chosen == "fused":
        verdict = _check_fused(call)
        if verdict is not None:
            if verdict.failure is not None:
                print(verdict, file=sys.stderr, flush=True)
            chosen = _choose(call, requirements, backend)
            check_backend(chosen, requirements)
    return chosen


def _choose(call: AttentionCall, requirements: Requirements, backend: str) -> str:
    """The backend itself, or the fastest for `auto`."""
    if backend != "auto":
        return backend
    if call.documents is not None:
        return _fastest_for_documents(requirements, call.q_len, packed=call.is_packed)
    plain = call.span == EVERY_KEY or (call.span == FULL and call.q_len == call.kv_len)
    return _fastest_backend(requirements, call.q_len, tables=call.has_tables, plain=plain)


def _fastest_for_documents(requirements: Requirements, q_len: int, *, packed: bool) -> str:
    """The backend that `auto` chooses for several documents. packed: see `AttentionCall.is_packed`."""
    if packed and _fused_is_fastest(requirements, q_len):
        return "fused"
    return "chunked" if requirements.weight or requirements.modify_scores else "sdpa"


def _check_fused(call: AttentionCall, name: str = "", again: bool = False) -> self_check.Verdict | None:
    return self_check.ensure_checked(call, BACKENDS["fused"], BACKENDS["chunked"], name=name, again=again)


def _fastest_backend(requirements: Requirements, q_len: int, *, tables: bool, plain: bool) -> str:
    """The backend that `auto` chooses.

    tables: the call has a bias or weight table. plain: there are as many queries as keys, and no window.
    """
    if requirements.modify_scores:
        return "chunked"
    if (tables or requirements.decay or not plain) and _fused_is_fastest(requirements, q_len):
        return "fused"
    if tables:
        return "chunked"
    on_cpu = requirements.device is not None and requirements.device.type == "cpu"
    return "chunked" if on_cpu and not plain else "sdpa"


def _fused_is_fastest(requirements: Requirements, q_len: int) -> bool:
    """On a CPU the kernels only run in Triton's interpreter, for tests. A single query would use only one row of a
    tile."""
    on_gpu = requirements.device is not None and requirements.device.type == "cuda"
    return on_gpu and q_len > 1 and _unsupported_reason("fused", requirements) is None


class Attention:
    """Attention for one positional method. Its constructor checks the backend; calling it works like `attend`.

    The backend is chosen at the first call of each kind (shapes, dtypes, gradients; see `AttentionCall.kind`).
    """

    def __init__(self, backend: str = "auto", positional: PositionalMethod | None = None):
        """`positional` is a method from `kerple.positional`, or None for no positions.

        Raises ValueError for an unknown backend and for hooks that exclude each other, and NotImplementedError for a
        backend that does not support the method.
        """
        self.backend = backend
        self.positional = positional
        self._chosen: dict[Hashable, str] = {}
        hooks: frozenset[str] = frozenset() if positional is None else positional.hooks
        self.has_bias, self.has_weight = "bias" in hooks, "weight" in hooks
        self.modifies_scores, self.has_decay = "modify_scores" in hooks, "decay" in hooks
        self._scales_qk = "scale_qk" in hooks
        if self.modifies_scores and hooks & {"bias", "weight", "decay", "scale_qk"}:
            raise ValueError(
                f"{type(positional).__name__} defines modify_scores, so it must not define bias, weight, decay or "
                "scale_qk too; compute the final scores in modify_scores, and scale queries and keys in rotate"
            )
        if self.has_decay and self.has_weight:
            raise ValueError(f"{type(positional).__name__} defines decay, so it must not define weight too")
        check_backend(backend, self._requirements())

    def _requirements(self, **others: Any) -> Requirements:
        """Those of the method, and others."""
        return Requirements(weight=self.has_weight, modify_scores=self.modifies_scores, decay=self.has_decay, **others)

    def _fastest(self, q_len: int, plain: bool, **others: Any) -> str:
        """The backend that `auto` chooses for this method and other requirements; see `_fastest_backend`."""
        tables = self.has_bias or self.has_weight
        return _fastest_backend(self._requirements(**others), q_len, tables=tables, plain=plain)

    def check_kernels(
        self,
        device: torch.device,
        dtype: torch.dtype,
        heads: int,
        head_size: int,
        *,
        training: bool,
        kv_heads: int | None = None,
        windowed: bool = False,
        documents: bool = False,
        again: bool = False,
    ) -> list[self_check.Verdict]:
        """Check the fused kernels that this method needs on a device (see `self_check`), if they would run there.

        If this is not called, the first call of attention checks them.

        Args:
            training: check calls with complete sequences and gradients; otherwise calls without gradients and with
                fewer queries than keys, with and without a window, and of lengths that are and are not multiples of
                `self_check.ALIGNMENT`.
            kv_heads: the number of key/value heads; by default, as many as heads.
            windowed: also check calls with a window in training.
            documents: in training, calls have documents.
            again: check even if this process already did.

        Returns the verdicts that were new to this process. Raises NotImplementedError if the configured backend does
        not support these calls on the device.
        """
        windows = (None, self_check.WINDOW) if windowed or not training else (None,)
        lengths = (self_check.KV_LEN,) if training else (self_check.KV_LEN, self_check.KV_LEN - self_check.ODD)
        verdicts = []
        with torch.inference_mode(False), torch.set_grad_enabled(training):
            for window, length in itertools.product(windows, lengths):
                query = torch.empty(1, heads, length, head_size, dtype=dtype, device=device, requires_grad=training)
                # Scaled queries and keys have a call for each document.
                has_documents = documents and not self._scales_qk
                one_document = Documents(torch.zeros(1, length, dtype=torch.long)) if has_documents else None
                key = query.new_empty(1, kv_heads or heads, length, head_size).requires_grad_(training)
                call = AttentionCall(
                    query=query if training else query[:, :, self_check.ALIGNMENT :],
                    key=key,
                    value=key,
                    scale=head_size**-0.5,
                    tables=position_tables(self.positional, length, device, with_jacobians=training),
                    decay_sums=key.new_zeros(1, heads, length, dtype=torch.float64) if self.has_decay else None,
                    span=Span(window=window),
                    documents=one_document,
                )
                requirements = replace(call.requirements, modify_scores=self.modifies_scores)
                chosen = _choose(call, requirements, self.backend)
                if not again:
                    check_backend(chosen, requirements)
                if chosen == "fused":
                    name = "" if self.positional is None else type(self.positional).__name__
                    verdict = _check_fused(call, name, again)
                    verdicts += [] if verdict is None else [verdict]
        return verdicts

    def choice(
        self,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        head_size: int = 64,
        *,
        windowed: bool = False,
        documents: bool = False,
    ) -> str:
        """The backend that runs on a device, and why, for a log. All calls have a window, or documents, if said so."""
        device = torch.device(device)
        on_gpu = device.type == "cuda" and torch.cuda.is_available()
        chunks = ""
        if self.modifies_scores and on_gpu and self.backend in ("auto", "chunked"):
            chunks = f", in chunks of at most {modify_budget(device) / 2**20:,.0f} MiB of scores on this GPU"
        if self.backend != "auto":
            return f"{self.backend} (as configured){chunks}"
        if self.modifies_scores:
            return f"chunked (auto: the only memory-efficient backend for a method with modify_scores){chunks}"
        options: dict[str, Any] = {"device": device, "dtype": dtype, "head_size": head_size}
        usual = self._requirements(**options)
        plain, other = self._fastest(2, not windowed, **options), self._fastest(2, False, **options)
        masked = documents and not self._scales_qk
        if documents:
            # All of them in one call of the fused kernels, or ordinary calls for documents of equal size.
            plain = "fused" if masked and _fused_is_fastest(usual, 2) else plain
            other = plain

        # Why, and for which calls.
        reason = f"fastest on {device.type} for this method"
        could_be_fused = self.has_bias or self.has_weight or self.has_decay or windowed or masked
        unsupported = _unsupported_reason("fused", usual) if could_be_fused and device.type == "cuda" else None
        if self_check.failure(usual) is not None:
            reason = "the fused kernels failed their self-check"
        elif unsupported is not None:
            reason = f"fused {unsupported}"
        others = "" if plain == other else f", and {other} for windows and for fewer queries than keys"
        return f"{plain}{others} (auto: {reason})"

    def runs_fused(
        self, device: torch.device, dtype: torch.dtype, shape: Sequence[int], *, plain: bool = False
    ) -> bool:
        """Whether the fused backend runs calls with queries `[b, h, s, d]` without dropout. For these, `prepare_tables`
        saves time, and so do jacobians in training. plain: see `_fastest_backend`.
        """
        if self.backend != "auto":
            return self.backend == "fused"
        batch, heads, q_len, head_size = shape
        options = {"dtype": dtype, "head_size": head_size, "batch_heads": batch * heads}
        return self._fastest(q_len, plain, device=device, **options) == "fused"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        tables: PositionTables | None = None,
        decay_sums: Tensor | None = None,
        window: int | None = None,
        block: int | None = None,
        documents: Documents | None = None,
        key_mask: Tensor | None = None,
        causal: bool = True,
        dropout_p: float = 0.0,
        scale: float | None = None,
        dropped: int = 0,
    ) -> Tensor:
        """Like `attend`, for queries and keys after the method's `rotate`.

        Args:
            tables: the method's tables for the distances below `Span.max_kv_len(t)` (see `position_tables`), which
                layers and steps without an update can share. They are computed if None.
            decay_sums: required if the method has a decay.
            documents: those of `attend`'s document_ids, which layers can share.
            dropped: the position of the first key, if earlier ones are outside of the window of every query. Not with
                documents or causal=False.

        Raises ValueError also if tables or decay sums do not fit the method, and for causal=False if the method is
        `causal_only`.
        """
        # The tables, by default computed here.
        span = Span(window, block, causal=causal)
        if not causal and self.positional is not None and self.positional.causal_only:
            raise ValueError(
                f"{type(self.positional).__name__} is defined only for causal attention; with causal=False, use a "
                "method that is a function of the distance, such as kerple_log, rotary, rpe or fire"
            )
        distances = span.max_kv_len(key.shape[2] if causal else max(query.shape[2], key.shape[2]))
        if tables is None:
            check_shapes(query, key, value)
            fused = self.runs_fused(query.device, query.dtype, query.shape)
            tables = position_tables(
                self.positional,
                distances,
                query.device,
                causal=causal,
                with_jacobians=fused and torch.is_grad_enabled(),
            )

        # Reject tables and decay sums that are not those of this method and direction.
        if self.has_bias != (tables.bias is not None) or self.has_weight != (tables.weight is not None):
            raise ValueError(
                f"the positional method has bias: {self.has_bias}, weight: {self.has_weight}; but the tables passed "
                f"are bias: {tables.bias is not None}, weight: {tables.weight is not None}"
            )
        if self.positional is not None and tables.signed != (self.positional.signed and not causal):
            raise ValueError(
                f"the tables of {type(self.positional).__name__} depend on the direction: pass "
                f"tables=position_tables(method, length, device, causal={causal})"
            )
        if self.has_decay != (decay_sums is not None):
            raise ValueError(
                "the positional method has a decay: pass decay_sums=decay_sums(method.decay(hidden))"
                if self.has_decay
                else "decay_sums were passed, but the positional method has no decay"
            )
        modify_scores = None
        if self.positional is not None and self.modifies_scores:
            modify_scores = self.positional.final_scores
            if tables.scores is None and self.positional.table(torch.zeros(1, device=query.device)) is not None:
                raise ValueError(
                    "the positional method has a table for modify_scores: pass tables=position_tables(method, "
                    f"{distances}, device)"
                )

        # Calls that need no other decision use the backend chosen for the first of them.
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            tables=tables,
            modify_scores=modify_scores,
            decay_sums=decay_sums,
            span=span,
            documents=documents,
            key_mask=key_mask,
            dropout_p=dropout_p,
            dropped=dropped,
        )
        if dropped and (documents is not None or not causal):
            raise ValueError("dropped must be 0 with documents or causal=False, which have positions of their own")
        if block is not None or documents is not None or self._scales_qk or torch.compiler.is_compiling():
            return _run(call.validate(), self.backend, self.positional)

        # A failed self-check changes what is chosen.
        kind = call.kind, self_check.rejections()
        chosen = self._chosen.get(kind)
        if chosen is None:
            chosen = _checked_choice(call.validate(), self.backend)
            if self_check.can_check(query):
                if len(self._chosen) == MAX_KINDS:
                    self._chosen.clear()
                self._chosen[kind] = chosen
        return BACKENDS[chosen].compute(call)
