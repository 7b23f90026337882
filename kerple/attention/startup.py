"""Before the first step: the check of the fused kernels, and which backend will run and why.

Legend: t key length, h heads, g key/value heads, d head size.
"""

import itertools
from dataclasses import dataclass

import torch

from kerple.attention import self_check
from kerple.attention.backend import Requirements
from kerple.attention.backends.chunk_plan import modify_budget
from kerple.attention.call import AttentionCall
from kerple.attention.dispatch import (
    check_backend,
    check_fused,
    choose,
    fastest_backend,
    fused_is_fastest,
    unsupported_reason,
)
from kerple.attention.documents import Documents
from kerple.attention.span import Span
from kerple.attention.tables import position_tables
from kerple.positional import PositionalMethod


@dataclass(frozen=True, kw_only=True)
class ExpectedCalls:
    """What calls of attention will be like, before their tensors exist.

    Attributes:
        method: None for an absolute method.
        heads, kv_heads, head_size: h, g and d.
        device, dtype: of queries, keys and values.
        training: calls have complete sequences and gradients; otherwise no gradients, and fewer
            queries than keys.
        windowed: calls have a window.
        documents: calls have documents, in training.
    """

    method: PositionalMethod | None
    heads: int
    kv_heads: int
    head_size: int
    device: torch.device
    dtype: torch.dtype
    training: bool = False
    windowed: bool = False
    documents: bool = False


def check_kernels(
    expected: ExpectedCalls, backend: str = "auto", *, again: bool = False
) -> list[self_check.Verdict]:
    """Check the fused kernels that the expected calls need (see `self_check`), if they would run on
    the device.

    If this is not called, the first call of attention checks them.

    With `training`, these are calls without a window, and with one if `windowed`. Without, they are
    calls with and without a window, and of lengths that are and are not multiples of
    `self_check.ALIGNMENT`. again: check even if this process already did.

    Returns the verdicts that were new to this process. Raises NotImplementedError if the configured
    backend does not support these calls on the device.
    """
    # The windows and lengths of the calls, which have different kernels.
    training = expected.training
    spans = [Span()]
    lengths = [self_check.KV_LEN]
    if expected.windowed or not training:
        spans.append(Span(window=self_check.WINDOW))
    if not training:
        lengths.append(self_check.KV_LEN - self_check.ODD)
    name = ""
    if expected.method is not None:
        name = type(expected.method).__name__

    # Check those that the fused backend would run.
    verdicts = []
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        for span, length in itertools.product(spans, lengths):
            call = _example(expected, span, length)
            requirements = Requirements.of_call(call)
            chosen = choose(call, requirements, backend)
            if not again:
                check_backend(chosen, requirements)
            if chosen != "fused":
                continue
            verdict = check_fused(call, name, again)
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


def _example(expected: ExpectedCalls, span: Span, length: int) -> AttentionCall:
    """One of the expected calls, with uninitialized keys `[1, g, t, d]`; in training with a query
    for each of them, otherwise for the last ones.
    """
    training = expected.training
    shape = 1, expected.heads, length, expected.head_size
    query = torch.empty(shape, dtype=expected.dtype, device=expected.device)
    key = query[:, :1].expand(-1, expected.kv_heads, -1, -1).clone().requires_grad_(training)
    # In decoding, the queries are the last positions of the keys.
    if not training:
        query = query[:, :, self_check.ALIGNMENT :]
    call = AttentionCall(
        query=query.requires_grad_(training),
        key=key,
        value=key,
        scale=expected.head_size**-0.5,
        method=expected.method,
        tables=position_tables(expected.method, length, query.device, with_jacobians=training),
        span=span,
    )

    # A decay and documents have kernels of their own; scaled states have a call per document.
    if "decay" in call.hooks:
        call.decay_sums = query.new_zeros(shape[:3], dtype=torch.float64)
    if expected.documents and "scale_qk" not in call.hooks:
        call.documents = Documents(torch.zeros(1, length, dtype=torch.long))
    return call


def describe_choice(expected: ExpectedCalls, backend: str = "auto") -> str:
    """The backend that runs the expected calls, and why, for a log."""
    method, device = expected.method, expected.device
    usual = Requirements.of(
        method, device=device, dtype=expected.dtype, head_size=expected.head_size
    )
    on_gpu = device.type == "cuda"

    # Methods with scores of their own need memory for a chunk of scores.
    chunks = ""
    runs_chunked = usual.modify_scores and backend in ("auto", "chunked")
    if runs_chunked and on_gpu and torch.cuda.is_available():
        mebibytes = modify_budget(device) / 2**20
        chunks = f", in chunks of at most {mebibytes:,.0f} MiB of scores on this GPU"
    if backend != "auto":
        return f"{backend} (as configured){chunks}"
    if usual.modify_scores:
        reason = "the only memory-efficient backend for a method with modify_scores"
        return f"chunked (auto: {reason}){chunks}"

    # The choices for plain calls, and for those with a window or with fewer queries than keys.
    hooks: frozenset[str] = frozenset()
    if method is not None:
        hooks = method.hooks
    has_tables = bool(hooks & {"bias", "weight"})
    plain = fastest_backend(usual, 2, tables=has_tables, plain=not expected.windowed)
    other = fastest_backend(usual, 2, tables=has_tables, plain=False)
    masked = expected.documents and "scale_qk" not in hooks
    if expected.documents:
        # One call of the fused kernels, or ordinary calls for documents of equal size.
        if masked and fused_is_fastest(usual, 2):
            plain = "fused"
        other = plain

    # Why, and for which calls.
    reason = f"fastest on {device.type} for this method"
    could_be_fused = has_tables or usual.decay or expected.windowed or masked
    if self_check.failure(usual) is not None:
        reason = "the fused kernels failed their self-check"
    elif could_be_fused and on_gpu:
        unsupported = unsupported_reason("fused", usual)
        if unsupported is not None:
            reason = f"fused {unsupported}"
    others = ""
    if plain != other:
        others = f", and {other} for windows and for fewer queries than keys"
    return f"{plain}{others} (auto: {reason})"
