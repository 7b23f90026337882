"""Inputs and checks for tests of attention and positional methods.

Legend: b batch, h heads, g key/value heads, s query length, t key length, d head size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kerple.attention import (
    FULL,
    Attention,
    AttentionCall,
    Documents,
    PositionTables,
    Span,
    run,
    score_table,
    tables,
)
from kerple.positional import (
    Chunk,
    Fire,
    ModelShape,
    PositionalMethod,
    TableJacobian,
    TransformerXL,
    XPos,
    build,
)
from kerple.positional.dape import Adaptive, DapeConvolution

# Queries, keys, span: training, a chunk of an evaluation, decoding, windows and blocks.
SPANS = [
    (23, 23, FULL),
    (9, 23, FULL),
    (1, 23, FULL),
    (23, 23, Span(window=6)),
    (1, 23, Span(window=6)),
    (23, 23, Span(block=4)),
    (8, 23, Span(block=4)),
]


def visible_pairs(length: int, span: Span) -> Tensor:
    """The definition of a span, pair by pair, bool `[t, t]`."""
    pairs = [
        [
            key <= query
            and (span.window is None or query - key < span.window)
            and (span.block is None or query // span.block - key // span.block <= 1)
            for key in range(length)
        ]
        for query in range(length)
    ]
    return torch.tensor(pairs)


def random_states(
    heads: int, size: int, t: int, batch: int = 2, seed: int = 0, kv_heads: int | None = None
) -> list[Tensor]:
    """Query `[b, h, t, d]`, key and value `[b, g, t, d]`, float64 leaves. By default, g = h."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            batch, count, t, size, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for count in (heads, kv_heads or heads, kv_heads or heads)
    ]


def attend_arguments(
    method: str,
    batch: int,
    heads: int,
    s: int,
    t: int,
    size: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
    kv_heads: int | None = None,
) -> dict[str, Any]:
    """Arguments of `attend` with the tables of a method. Tensors require gradients."""
    torch.manual_seed(0)
    positional = build(method, ModelShape(heads, size, heads * size, 1, t))
    bias, weight = (
        None
        if table is None
        else table.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        for table in tables(positional, t if window is None else min(t, window), "cpu")
    )
    # The memory layout of a model: heads are inside positions.
    query, key, value = (
        torch.randn(batch, length, count, size, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length, count in ((s, heads), (t, kv_heads or heads), (t, kv_heads or heads))
    )
    return {
        "query": query,
        "key": key,
        "value": value,
        "bias_table": bias,
        "weight_table": weight,
        "window": window,
    }


def random_attend_arguments(
    batch: int,
    heads: int,
    s: int,
    t: int,
    size: int,
    *,
    bias: bool = True,
    weight: bool = True,
    decay: bool = False,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    kv_heads: int | None = None,
) -> dict[str, Any]:
    """Like `attend_arguments`, with random tables, on any device. decay: with prefix sums, as after
    40,000 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    max_kv_len = Span(window).max_kv_len(t)
    query, key, value = (
        torch.randn(batch, length, count, size, generator=generator)
        .to(device, dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length, count in ((s, heads), (t, kv_heads or heads), (t, kv_heads or heads))
    )
    bias_table, weight_table = (
        (torch.rand(heads, max_kv_len, generator=generator) * 2 - 1).to(device).requires_grad_()
        if exists
        else None
        for exists in (bias, weight)
    )
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "bias_table": bias_table,
        "weight_table": weight_table,
    }
    if decay:
        decays = -0.2 * torch.rand(batch, heads, t, generator=generator, dtype=torch.float64)
        arguments["decay_sums"] = (decays.cumsum(-1) - 4000).to(device).requires_grad_()
    return {**arguments, "window": window}


def float64_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name: leaf.detach().double().requires_grad_() if isinstance(leaf, Tensor) else leaf
        for name, leaf in arguments.items()
    }


def upstream_gradient(result: Tensor) -> Tensor:
    """The same gradient for each result of this shape."""
    return torch.randn(
        result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    ).to(result)


def attend_with(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias_table: Tensor | None = None,
    weight_table: Tensor | None = None,
    bias_jacobian: TableJacobian | None = None,
    weight_jacobian: TableJacobian | None = None,
    document_ids: Tensor | None = None,
    window: int | None = None,
    block: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """`attend`, also with what only a positional method has: jacobians, decay sums,
    dropped keys.
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
        ),
        span=Span(window, block, causal=causal),
        documents=None if document_ids is None else Documents(document_ids),
        **options,
    )
    return run(call, backend)


def run_attend(
    backend: str,
    arguments: dict[str, Any],
    upstream_dtype: torch.dtype = torch.float64,
    **options: Any,
) -> list[Tensor]:
    """The result of attention, and the gradients of all tensors. The upstream gradient is rounded
    to a dtype.
    """
    result = attend_with(backend=backend, **arguments, **options)
    upstream = torch.randn(
        result.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, Tensor)]
    return [
        result.detach(),
        *torch.autograd.grad(result, leaves, upstream.to(upstream_dtype).to(result)),
    ]


def run_repeated(arguments: dict[str, Any], **options: Any) -> list[Tensor]:
    """Like `run_attend("reference", ...)`, with a copy of its key/value head for each
    query head.
    """
    repeats = arguments["query"].shape[1] // arguments["key"].shape[1]
    repeated = {
        name: arguments[name].repeat_interleave(repeats, dim=1) for name in ("key", "value")
    }
    result = attend_with(backend="reference", **{**arguments, **repeated}, **options)
    leaves = [leaf for leaf in arguments.values() if isinstance(leaf, Tensor)]
    return [result.detach(), *torch.autograd.grad(result, leaves, upstream_gradient(result))]


def attended(
    backend: str,
    method: PositionalMethod,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s: int,
    span: Span,
    **options: Any,
) -> Tensor:
    """Attention of the last s queries of `[b, h, t, d]`, with key and value `[b, g, t, d]`, as in a
    model's layer: including the method's `rotate` and tables.
    """
    queries = query[:, :, key.shape[2] - s :]
    return Attention(method, backend)(
        queries, key, value, window=span.window, block=span.block, **options
    )


def assert_is_formula(
    method: PositionalMethod,
    formula: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    size: int,
    backends: tuple[str, ...] = ("reference", "chunked"),
    atol: float = 1e-10,
) -> None:
    """Compare values and gradients, including those of the method's parameters, for all SPANS.

    formula: (query, key, visible pairs) -> scores `[b, h, t, t]`.
    """
    parameters = list(method.parameters())
    for s, t, span in SPANS:
        leaves = random_states(heads, size, t)
        visible = visible_pairs(t, span)
        scores = formula(*leaves[:2], visible).masked_fill(~visible, float("-inf"))
        expected = (scores.softmax(-1) @ leaves[2])[:, :, t - s :]
        upstream = upstream_gradient(expected)
        expected_grads = torch.autograd.grad(expected, [*leaves, *parameters], upstream)
        for backend in backends:
            actual = attended(backend, method, *leaves, s, span)
            torch.testing.assert_close(actual, expected, rtol=0, atol=atol)
            grads = torch.autograd.grad(actual, [*leaves, *parameters], upstream)
            for index, (grad, expected_grad) in enumerate(zip(grads, expected_grads, strict=True)):
                note = f"gradient {index} with {backend}, {s} of {t}, {span}: "
                torch.testing.assert_close(
                    grad,
                    expected_grad,
                    rtol=1e-8,
                    atol=10 * atol,
                    msg=lambda text, note=note: note + text,
                )


class LargestStorage(TorchDispatchMode):
    """Records the largest storage in memory of any operation's result, in float32 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return results


def peak_memory(compute: Callable[[], object]) -> int:
    """The peak number of bytes that a computation on the CPU allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


class DecayingXPos(XPos):
    def decay(self, hidden):
        raise NotImplementedError  # the tests pass its sums


def dense_attention(
    method: PositionalMethod,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    decay_sums: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention to rotated keys with explicit scores of all pairs; mask: bool `[b, 1, s, t]`, True
    = masked.
    """
    scores = dense_scores(method, query, key, mask, decay_sums, causal)
    exponentials = (scores - scores.amax(-1, keepdim=True).detach()).exp().masked_fill(mask, 0.0)
    sums = exponentials.sum(-1, keepdim=True)
    probabilities = exponentials / torch.where(sums == 0, 1.0, sums)
    return probabilities @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


def dense_scores(
    method: PositionalMethod,
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    decay_sums: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The final scores of all pairs, `[b, h, s, t]`; those of masked pairs are arbitrary."""
    (s, size), t = query.shape[2:], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    queries, keys = torch.arange(t - s, t) if causal else torch.arange(s), torch.arange(t)
    signed = queries[:, None] - keys
    distance = signed.clamp(min=0) if causal else signed.abs()
    decays = torch.ones(s, t, size, dtype=torch.float64)
    if isinstance(method, XPos):
        zeta = (torch.arange(size // 2, dtype=torch.float64) / (size // 2) + 0.4) / 1.4
        decays = zeta.repeat_interleave(2) ** (distance[..., None] / method.scale_base)
    scores = torch.einsum("bhsd,bhtd,std->bhst", query, key, decays) * size**-0.5
    if "modify_scores" in method.hooks and not causal:
        scores = modified_scores(method, scores, query, signed, mask, causal=False)
    elif "modify_scores" in method.hooks:
        scores = method.final_scores(
            Chunk(scores, query, queries, keys, mask, score_table(method, t, "cpu"))
        )
    # Float32 tables, whose values can depend on their number. Causal calls take the first t
    # distances.
    if "weight" in method.hooks:
        scores = scores * _pairs(method.weight, signed, method.signed, causal)
    if "bias" in method.hooks:
        scores = scores + _pairs(method.bias, signed, method.signed, causal)
    if decay_sums is not None:
        scores = scores + decay_sums[:, :, t - s :, None] - decay_sums[:, :, None]
    return scores


def _pairs(
    table: Callable[[Tensor], Tensor], signed: Tensor, has_direction: bool, causal: bool
) -> Tensor:
    """A table `[h, n]` of a method for all pairs, `[h, s, t]`. signed: their signed distances
    `[s, t]`.
    """
    if not causal:
        return table((signed if has_direction else signed.abs()).float())
    return table(torch.arange(signed.shape[1]).float())[..., signed.clamp(min=0)]


def xpos_products(
    query: Tensor, key: Tensor, distance: Tensor, scale_base: float, base: float = 10_000.0
) -> Tensor:
    """xPos's q.k for all pairs at distances `[s, t]`: real parts of complex products of the
    dimensions (2i, 2i + 1).
    """
    pairs = torch.arange(query.shape[-1] // 2, dtype=torch.float64) / (query.shape[-1] // 2)
    distance = distance.double()[..., None]
    decay = ((pairs + 0.4) / 1.4) ** (distance.clamp(min=0) / scale_base)
    turns = torch.polar(decay, distance * base**-pairs)
    query, key = (torch.complex(states[..., 0::2], states[..., 1::2]) for states in (query, key))
    return (query[:, :, :, None] * key[:, :, None].conj() * turns).real.sum(-1)


def modified_scores(
    method: PositionalMethod,
    scores: Tensor,
    query: Tensor,
    distance: Tensor,
    mask: Tensor,
    queries: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """The formulas of DAPE, FIRE and Transformer-XL for all pairs of a text.

    query: after `rotate`. distance: `[t, t]`; negative for keys after the query, unless they are
    masked. queries: the positions of the queries `[t, 1]`, by default from 0 on.
    """
    distance = distance.double()
    queries = torch.arange(len(distance))[:, None] if queries is None else queries
    if isinstance(method, TransformerXL):
        size = method.relative.weight.shape[1]
        angles = distance[..., None] / 10_000.0 ** (
            torch.arange(0, size, 2, dtype=torch.float64) / size
        )
        vectors = (
            torch.cat((angles.sin(), angles.cos()), dim=-1) @ method.relative.weight.double().T
        )
        # `rotate` has added u to the query.
        states = query - method.content_bias + method.position_bias
        products = torch.einsum(
            "bhsd,sthd->bhst", states, vectors.unflatten(-1, states.shape[1::2])
        )
        return scores + products / query.shape[-1] ** 0.5
    if isinstance(method, Fire):
        return scores + _fire_bias(method, distance, queries)

    # DAPE, with the static bias in the residual and in the inputs of the MLP.
    assert isinstance(method, Adaptive)
    inputs, residual, static = scores, scores, method.static
    if static is not None:
        is_fire = isinstance(static, Fire)
        bias = (
            _fire_bias(static, distance, queries)
            if is_fire
            else static.bias(distance.abs()).double()
        )
        inputs = torch.cat((scores, bias.expand_as(scores)), dim=1)
        if method.variant == "Add_Residual":
            inputs = scores + bias
        if method.variant != "Concat":
            residual = scores + bias
    first, second = (list(layer.parameters()) for layer in (method.first, method.second))
    if not isinstance(method, DapeConvolution):
        hidden = F.leaky_relu(F.linear(inputs.movedim(1, -1), *first), 0.01)
        return residual + F.linear(hidden, *second).movedim(-1, 1)

    # Hidden units of keys after a causal query count, including some after the last key of the
    # text.
    length, radius = len(distance), first[0].shape[-1] // 2
    seen = F.pad(~mask, (0, radius))
    later = torch.arange(length + radius) > torch.arange(length)[:, None]
    hidden = F.leaky_relu(
        F.conv2d(F.pad(inputs, (0, radius)) * seen, *first, padding=(0, radius)), 0.01
    )
    return (
        residual
        + F.conv2d(hidden * (seen | later & causal), *second, padding=(0, radius))[..., :length]
    )


def _fire_bias(method: Fire, distance: Tensor, queries: Tensor) -> Tensor:
    """`[h, t, t]`; in the place of a query's position, that of a later key."""
    later = torch.maximum(queries, queries - distance)
    longest = torch.maximum(later, (method.m * method.threshold).abs())
    relative = (1 + method.c.abs() * distance.abs()).log() / (
        (1 + method.c.abs() * longest).log() + 1e-6
    )
    hidden = method.activation(F.linear(relative[..., None], *method.first.parameters()))
    return F.linear(hidden, *method.second.parameters()).permute(2, 0, 1)
