"""The choice of the backend of a call, and the call itself in one or several parts.

Legend: b batch, s query length, h heads, d head size.
"""

import sys
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kerple.attention import parts, self_check
from kerple.attention.backend import Requirements
from kerple.attention.backends.chunked import CHUNKED
from kerple.attention.backends.flex import FLEX
from kerple.attention.backends.reference import REFERENCE
from kerple.attention.backends.sdpa import SDPA
from kerple.attention.backends.triton.operator import FUSED
from kerple.attention.call import AttentionCall
from kerple.positional import PositionalMethod

BACKENDS = {backend.name: backend for backend in (REFERENCE, SDPA, CHUNKED, FLEX, FUSED)}
# Kinds of calls whose backend is remembered.
MAX_KINDS = 256


def backend_names() -> tuple[str, ...]:
    """The values of `attention-backend`."""
    return ("auto", *BACKENDS)


class Dispatcher:
    """Validates and computes calls. It remembers the backend that it chose for each kind of call,
    since all layers and steps of a model have the same few kinds.
    """

    def __init__(self, backend: str = "auto"):
        """backend: one of `backend_names()`. `auto` takes the fastest, after a check of its kernels
        on the first use of their kind.
        """
        self.backend = backend
        self._chosen: dict[Hashable, str] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """The result of a call, `[b, h, s, v]`.

        Raises ValueError for arguments that do not fit together or an unknown backend, and
        NotImplementedError for a backend that does not support the call.
        """
        call.validate()
        # The usual call: one kind, one backend.
        if call.documents is None and call.span.block is None and "scale_qk" not in call.hooks:
            return BACKENDS[self._choice(call)].compute(call)

        # Calls of several parts: each has its own kind. Packed documents are one call of the fused
        # kernels, which read only the documents' own keys.
        masks_documents = None
        if self.backend != "auto":
            check_backend(self.backend, Requirements())
            masks_documents = BACKENDS[self.backend].masks_documents
        if call.is_packed and choose(call, Requirements.of_call(call), self.backend) == "fused":
            masks_documents = True
        return parts.run(call, self._compute_part, masks_documents=masks_documents)

    def _compute_part(self, part: AttentionCall) -> Tensor:
        return BACKENDS[checked_choice(part, self.backend)].compute(part)

    def _choice(self, call: AttentionCall) -> str:
        """The remembered backend for calls of this kind."""
        # A compiled graph and a captured one check nothing, so their choice may differ.
        if torch.compiler.is_compiling() or not self_check.can_check(call.query):
            return checked_choice(call, self.backend)
        # A failed self-check changes what is chosen.
        kind = call.kind, self_check.rejections()
        chosen = self._chosen.get(kind)
        if chosen is None:
            chosen = checked_choice(call, self.backend)
            if len(self._chosen) == MAX_KINDS:
                self._chosen.clear()
            self._chosen[kind] = chosen
        return chosen


# -- the checks of a choice ------------------------------------------------------------------------


def run(call: AttentionCall, backend: str = "auto") -> Tensor:
    """Validate and compute one call; see `Dispatcher`."""
    return Dispatcher(backend)(call)


def checked_choice(call: AttentionCall, backend: str) -> str:
    """The backend for a validated call, after the self-check of its kernels."""
    requirements = Requirements.of_call(call)
    chosen = choose(call, requirements, backend)
    check_backend(chosen, requirements)
    # Only the fused kernels depend on a compiler and a driver, so only they are checked.
    if chosen != "fused":
        return chosen
    verdict = check_fused(call)
    if verdict is None or verdict.failure is None:
        return chosen

    # The kernels are excluded now: `auto` chooses another backend, and `fused` is an error.
    print(verdict, file=sys.stderr, flush=True)
    chosen = choose(call, requirements, backend)
    check_backend(chosen, requirements)
    return chosen


def check_fused(
    call: AttentionCall, name: str = "", again: bool = False
) -> self_check.Verdict | None:
    """Compare the fused kernels with the chunked backend; see `self_check.ensure_checked`."""
    return self_check.ensure_checked(
        call, BACKENDS["fused"], BACKENDS["chunked"], name=name, again=again
    )


def check_backend(backend: str, requirements: Requirements) -> None:
    """Check that a backend supports calls with these requirements; `auto` supports all of them.

    Raises ValueError for an unknown name and NotImplementedError for a backend that does not
    support them.
    """
    if backend == "auto":
        return
    if backend not in BACKENDS:
        raise ValueError(
            f"attention-backend {backend!r} is unknown; choose one of {', '.join(backend_names())}"
        )
    # A backend that was asked for is never replaced silently.
    reason = unsupported_reason(backend, requirements)
    if reason is not None:
        supported = [name for name in BACKENDS if unsupported_reason(name, requirements) is None]
        raise NotImplementedError(
            f"attention-backend {backend!r} {reason}; use auto, or one of {', '.join(supported)}"
        )


def unsupported_reason(backend: str, requirements: Requirements) -> str | None:
    """Like `Backend.unsupported_reason`, but also excludes kernels that failed their self-check."""
    reason = BACKENDS[backend].unsupported_reason(requirements)
    if reason is None and backend == "fused":
        return self_check.failure(requirements)
    return reason


# -- what `auto` chooses ---------------------------------------------------------------------------


def choose(call: AttentionCall, requirements: Requirements, backend: str) -> str:
    """The backend itself, or the fastest for `auto`."""
    if backend != "auto":
        return backend
    if call.documents is not None:
        if call.is_packed and fused_is_fastest(requirements, call.q_len):
            return "fused"
        if requirements.weight or requirements.modify_scores:
            return "chunked"
        return "sdpa"
    return fastest_backend(requirements, call.q_len, tables=call.has_tables, plain=call.is_plain)


def fastest_backend(requirements: Requirements, q_len: int, *, tables: bool, plain: bool) -> str:
    """The backend that `auto` chooses for calls without documents.

    tables: the call has a bias or weight table. plain: see `AttentionCall.is_plain`.
    """
    # Only two backends compute such scores, and `reference` keeps all of them in memory.
    if requirements.modify_scores:
        return "chunked"
    # Plain attention without positions in its scores is what SDPA is for.
    needs_fused = tables or requirements.decay or not plain
    if needs_fused and fused_is_fastest(requirements, q_len):
        return "fused"
    # SDPA would need the biases of all pairs in memory.
    on_cpu = requirements.device is not None and requirements.device.type == "cpu"
    if tables or (on_cpu and not plain):
        return "chunked"
    return "sdpa"


def fused_is_fastest(requirements: Requirements, q_len: int) -> bool:
    """On a CPU the kernels only run in Triton's interpreter, for tests. A single query would use
    only one row of a tile.
    """
    on_gpu = requirements.device is not None and requirements.device.type == "cuda"
    return on_gpu and q_len > 1 and unsupported_reason("fused", requirements) is None


def runs_fused(
    method: PositionalMethod | None,
    backend: str,
    like: Tensor,
    shape: Sequence[int],
    *,
    plain: bool = False,
) -> bool:
    """Whether the fused backend runs calls of a method without dropout. For these, `prepare_tables`
    saves time, and so do jacobians in training.

    like: a tensor on the device and of the dtype of the queries. shape: that of the queries,
    `[b, h, s, d]`. plain: see `AttentionCall.is_plain`.
    """
    if backend != "auto":
        return backend == "fused"
    batch, heads, q_len, head_size = shape
    requirements = Requirements.of(
        method,
        dtype=like.dtype,
        head_size=head_size,
        batch_heads=batch * heads,
        device=like.device,
    )
    has_tables = method is not None and bool(method.hooks & {"bias", "weight"})
    return fastest_backend(requirements, q_len, tables=has_tables, plain=plain) == "fused"
