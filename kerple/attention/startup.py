"""Before the first step: the check of the fused kernels, and which backend will run and why.

Legend: t key length, h heads, g key/value heads, d head size.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

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


class Heads(NamedTuple):
    """The heads of attention: h query heads and g key/value heads, of size d."""

    queries: int
    keys: int
    size: int


def check_kernels(
    method: PositionalMethod | None,
    heads: Heads,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    training: bool,
    backend: str = "auto",
    windowed: bool = False,
    documents: bool = False,
    again: bool = False,
) -> list[self_check.Verdict]:
    """Check the fused kernels that a method needs on a device (see `self_check`), if they would run
    there.

    If this is not called, the first call of attention checks them.

    Args:
        dtype: of queries, keys and values.
        training: check calls with complete sequences and gradients; otherwise calls without
            gradients and with fewer queries than keys, with and without a window, and of lengths
            that are and are not multiples of `self_check.ALIGNMENT`.
        windowed: also check calls with a window in training.
        documents: in training, calls have documents.
        again: check even if this process already did.

    Returns the verdicts that were new to this process. Raises NotImplementedError if the configured
    backend does not support these calls on the device.
    """
    # The windows and lengths of the calls, which have different kernels.
    spans = [Span()]
    lengths = [self_check.KV_LEN]
    if windowed or not training:
        spans.append(Span(window=self_check.WINDOW))
    if not training:
        lengths.append(self_check.KV_LEN - self_check.ODD)
    name = ""
    if method is not None:
        name = type(method).__name__

    # Check those that the fused backend would run.
    verdicts = []
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        for span, length in itertools.product(spans, lengths):
            query = torch.empty(1, heads.queries, length, heads.size, dtype=dtype, device=device)
            call = _example(method, query, heads.keys, span, documents)
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


def _example(
    method: PositionalMethod | None,
    query: Tensor,
    kv_heads: int,
    span: Span,
    documents: bool,
) -> AttentionCall:
    """A call of the kind that `check_kernels` checks, with the states of an uninitialized query
    `[1, h, t, d]`; in training (with gradients enabled) of all positions, otherwise of the last.
    """
    # In decoding, the queries are the last positions of the keys.
    _, heads, length, head_size = query.shape
    training = torch.is_grad_enabled()
    key = query[:, :1].expand(-1, kv_heads, -1, -1).clone().requires_grad_(training)
    if not training:
        query = query[:, :, self_check.ALIGNMENT :]
    call = AttentionCall(
        query=query.requires_grad_(training),
        key=key,
        value=key,
        scale=head_size**-0.5,
        method=method,
        tables=position_tables(method, length, query.device, with_jacobians=training),
        span=span,
    )

    # A decay and documents have kernels of their own.
    if "decay" in call.hooks:
        sums = query.new_zeros(1, heads, length, dtype=torch.float64)
        call = replace(call, decay_sums=sums)
    if documents and "scale_qk" not in call.hooks:  # scaled states have a call per document
        one_document = Documents(torch.zeros(1, length, dtype=torch.long))
        call = replace(call, documents=one_document)
    return call


def describe_choice(
    method: PositionalMethod | None,
    backend: str,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_size: int = 64,
    *,
    windowed: bool = False,
    documents: bool = False,
) -> str:
    """The backend that runs on a device, and why, for a log. All calls have a window, or documents,
    if said so.
    """
    device = torch.device(device)
    usual = Requirements.of(method, device=device, dtype=dtype, head_size=head_size)
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
    plain = fastest_backend(usual, 2, tables=has_tables, plain=not windowed)
    other = fastest_backend(usual, 2, tables=has_tables, plain=False)
    masked = documents and "scale_qk" not in hooks
    if documents:
        # One call of the fused kernels, or ordinary calls for documents of equal size.
        if masked and fused_is_fastest(usual, 2):
            plain = "fused"
        other = plain

    # Why, and for which calls.
    reason = f"fastest on {device.type} for this method"
    could_be_fused = has_tables or usual.decay or windowed or masked
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
