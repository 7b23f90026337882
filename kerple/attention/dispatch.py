"""The attention call, and the choice of the backend behind it.

Legend: b batch, s query length, t key length, h heads, d head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kerple.attention.backends.adaptive import adaptive_attention
from kerple.attention.backends.chunked import chunked_attention
from kerple.attention.backends.flex import flex_attention
from kerple.attention.backends.reference import reference_attention
from kerple.attention.backends.sdpa import sdpa_attention
from kerple.attention.backends.triton.launch import fused_attention, unsupported_reason
from kerple.attention.precision import no_autocast
from kerple.attention.segments import decayed
from kerple.attention.span import Span, blockwise


@dataclass(frozen=True)
class Backend:
    """A way to compute attention, and what it cannot do."""

    run: Callable[..., Tensor]
    weight: bool = True
    modify_scores: bool = False
    jacobians: bool = False


BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference_attention, modify_scores=True),
    "sdpa": Backend(sdpa_attention, weight=False),
    "chunked": Backend(chunked_attention, modify_scores=True),
    "flex": Backend(flex_attention),
    "fused": Backend(fused_attention, jacobians=True),
}


def backend_names() -> tuple[str, ...]:
    """What `attention-backend` may be."""
    return ("auto", *BACKENDS)


def check_backend(backend: str, *, bias: bool, weight: bool, modify_scores: bool = False) -> None:
    """Raise ValueError for an unknown name, NotImplementedError for a backend that cannot serve such a method."""
    if backend not in backend_names():
        raise ValueError(f"attention-backend {backend!r} is not known; choose one of {', '.join(backend_names())}")
    if backend != "auto" and weight and not BACKENDS[backend].weight:
        raise NotImplementedError(
            f"attention-backend {backend!r} cannot multiply scores by a weight, which this positional method needs; "
            f"use auto, or one of {', '.join(name for name, known in BACKENDS.items() if known.weight)}"
        )
    if backend != "auto" and modify_scores and not BACKENDS[backend].modify_scores:
        raise NotImplementedError(
            f"attention-backend {backend!r} cannot hand scores to the positional method, which makes the final ones "
            f"here; use auto, or one of {', '.join(name for name, known in BACKENDS.items() if known.modify_scores)}"
        )


def fastest_backend(device: torch.device, *, tables: bool, plain: bool, fused: bool) -> str:
    """What `auto` takes for a call with or without tables, `plain` being as many queries as keys and no window, and
    `fused` whether that backend serves.
    """
    if fused and (tables or not plain):
        return "fused"
    if tables:
        return "chunked"
    return "sdpa" if plain or device.type != "cpu" else "chunked"


class Attention:
    """Attention for one positional method, by a backend that is checked when this is made."""

    def __init__(self, backend: str = "auto", positional=None):
        """`positional` is a method, as in `kerple.positional`; None means none.

        Raises ValueError for an unknown backend and NotImplementedError for one that cannot serve the method.
        """
        self.backend = backend
        self.bias = positional is not None and positional.has_bias
        self.weight = positional is not None and positional.has_weight
        self.adapting = positional if positional is not None and positional.modifies_scores else None
        self.decaying = positional if positional is not None and positional.scales_qk else None
        if self.adapting is not None and (self.bias or self.weight):
            raise ValueError(
                f"{type(positional).__name__} has `modify_scores`, so it may have neither `bias` nor `weight`"
            )
        check_backend(backend, bias=self.bias, weight=self.weight, modify_scores=self.adapting is not None)

    def choice(self, device: torch.device | str) -> str:
        """The backend that runs on a device, and what chose it: to be printed once."""
        if self.backend != "auto":
            return f"{self.backend} (as configured)"
        if self.adapting is not None:
            return "chunked (auto: the only one but reference for a method that makes the scores itself)"
        device, tables = torch.device(device), self.bias or self.weight
        fused = device.type == "cuda" and unsupported_reason(device, torch.bfloat16, 64, 0.0) is None
        plain, other = (fastest_backend(device, tables=tables, plain=case, fused=fused) for case in (True, False))
        if plain == other == "fused":
            return (
                "fused (auto: the fastest on cuda for this method; chunked where it does not serve: "
                "attention dropout, float64, head sizes beyond 128, and a query alone)"
            )
        if plain == other:
            return f"{plain} (auto: the fastest on {device.type} for this method)"
        return f"{plain}, and {other} for windows and for fewer queries than keys (auto: the fastest of each)"

    def uses_jacobians(self, device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> bool:
        """Whether the backend gains by the tables' jacobians, for queries `[b, h, s, d]` without dropout."""
        if not torch.is_grad_enabled():
            return False
        if self.backend == "auto":
            return _fused_serves(device, dtype, shape, dropout_p=0.0)
        return BACKENDS[self.backend].jacobians

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias_table: Tensor | None = None,
        weight_table: Tensor | None = None,
        window: int | None = None,
        block: int | None = None,
        **options,
    ) -> Tensor:
        """As `attend`, for queries and keys that the method's `rotate` has turned. Raises ValueError also when a
        table is missing that the positional method has.
        """
        if self.bias != (bias_table is not None) or self.weight != (weight_table is not None):
            raise ValueError(
                f"the positional method has bias: {self.bias}, weight: {self.weight}; but the tables given are "
                f"bias: {bias_table is not None}, weight: {weight_table is not None}"
            )
        attention = partial(
            attend,
            bias_table=bias_table,
            weight_table=weight_table,
            window=window,
            block=block,
            modify_scores=None if self.adapting is None else self.adapting.modify_scores,
            backend=self.backend,
            **options,
        )
        if self.decaying is not None:
            return decayed(attention, self.decaying, query, key, value, Span(window, block))
        return attention(query, key, value)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    modify_scores: Callable[..., Tensor] | None = None,
    table: Tensor | None = None,
    window: int | None = None,
    block: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    bias_jacobian=None,
    weight_jacobian=None,
) -> Tensor:
    """softmax(weight * q.k * scale + bias) v, causal: `[b, h, s, d]` of query and `[b, h, t, d]` of key and value.

    The queries are the last s of the t positions: query i stands at t - s + i, and sees the keys up to its own. With
    a window it sees the last `window` of them, itself included; with a block those of its own block of positions and
    of the block before (see `Span`). Tables are over distance, float32 `[h, >= Span.max_kv_len(t)]`, and get their exact
    gradients. `scale` is 1 / sqrt(d) unless given; `dropout_p` drops probabilities. A method that makes the final
    scores gives its `modify_scores` instead of these tables, and what its `table` has for the distances below Span.max_kv_len(t).
    A jacobian (see `jacobians`) is another way to the same gradients: a backend that takes it leaves the
    table's own to the distances for which it does not hold.

    Raises ValueError for shapes that do not fit and NotImplementedError for a backend that cannot serve.
    """
    span = Span(window, block)
    jacobians = {"bias_jacobian": bias_jacobian, "weight_jacobian": weight_jacobian}
    _check_shapes(query, key, value, bias_table, weight_table, span, dropout_p)
    for name, one in jacobians.items():
        _check_jacobian(name, one, query.shape[1], span.max_kv_len(key.shape[2]))
    check_backend(
        backend, bias=bias_table is not None, weight=weight_table is not None, modify_scores=modify_scores is not None
    )
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if modify_scores is not None:
        with no_autocast(query.device):
            return adaptive_attention(
                query,
                key,
                value,
                modify_scores=modify_scores,
                table=table,
                span=span,
                dropout_p=dropout_p,
                scale=scale,
                whole=backend == "reference",
            )
    if block is not None and key.shape[2] > 2 * block:
        # Every part is a call of its own, for which `auto` takes the fastest.
        causal = partial(
            attend,
            bias_table=bias_table,
            weight_table=weight_table,
            dropout_p=dropout_p,
            scale=scale,
            backend=backend,
            **jacobians,
        )
        return blockwise(causal, query, key, value, block)
    if backend == "auto":
        tables = bias_table is not None or weight_table is not None
        plain = window is None and query.shape[2] == key.shape[2]
        fused = _fused_serves(query.device, query.dtype, query.shape, dropout_p)
        backend = fastest_backend(query.device, tables=tables, plain=plain, fused=fused)
    with no_autocast(query.device):
        return BACKENDS[backend].run(
            query,
            key,
            value,
            bias_table=bias_table,
            weight_table=weight_table,
            window=window,
            dropout_p=dropout_p,
            scale=scale,
            **(jacobians if BACKENDS[backend].jacobians else {}),
        )


def _fused_serves(device: torch.device, dtype: torch.dtype, shape: Sequence[int], dropout_p: float) -> bool:
    """On a CPU it is for tests alone; a query alone would leave all but one row of a tile idle."""
    batch, heads, queries, size = shape
    return (
        device.type == "cuda"
        and queries > 1
        and unsupported_reason(device, dtype, size, dropout_p, batch * heads) is None
    )


def _check_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias_table: Tensor | None,
    weight_table: Tensor | None,
    span: Span,
    dropout_p: float,
) -> None:
    batch, heads, s, _ = query.shape
    t = key.shape[2]
    if key.shape != value.shape or (batch, heads, query.shape[3]) != (*key.shape[:2], key.shape[3]):
        raise ValueError(f"query {[*query.shape]}, key {[*key.shape]} and value {[*value.shape]} do not fit together")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if not 0 < s <= t:
        raise ValueError(f"the {s} queries are the last of the {t} positions: there must be 1 to {t} of them")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention dropout {dropout_p} is not in [0, 1)")
    max_kv_len = span.max_kv_len(t)
    for name, table in (("bias", bias_table), ("weight", weight_table)):
        if table is not None and (table.shape[0] != heads or table.shape[1] < max_kv_len):
            raise ValueError(f"{name} table {[*table.shape]} must be [{heads}, at least {max_kv_len}]")


def _check_jacobian(name: str, jacobian, heads: int, max_kv_len: int) -> None:
    if jacobian is None:
        return
    numbers, directions = [*jacobian.coefficients.shape], [*jacobian.directions.shape]
    if numbers[:1] != [heads] or directions[:-1] != numbers or directions[-1] < max_kv_len:
        raise ValueError(
            f"{name} has coefficients {numbers} and directions {directions}; they must be [{heads}, p] and "
            f"[{heads}, p, at least {max_kv_len}]"
        )
