"""The self-check of the fused kernels: before their first use on a GPU, they are compared with the
chunked backend.

A kernel can work on one GPU and fail on another because of a compiler or driver bug. The check runs
a small call, with the same kind of tables, dtype and head size as the real one, with both backends
and compares results and gradients. It covers partial tiles, fewer queries than keys and, if the
real call has them, a window and grouped queries. Each process checks; after the first one, Triton's
cache has the compiled kernels.

After a failure, `dispatch` does not choose the kernels in this process for the same dtype and head
size.

Legend: b batch, s query length, t key length, h heads, d head size, p coefficients per head, n
distances.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kerple.attention.backend import Backend, Requirements, without_autocast
from kerple.attention.call import AttentionCall
from kerple.attention.documents import Documents
from kerple.attention.span import FULL, Span
from kerple.attention.tables import PositionTables
from kerple.positional import TableJacobian

# Sizes of the small call, which are not multiples of a tile. Triton compiles other kernels for
# sizes that are not multiples of ALIGNMENT: for these, the call is ODD tokens shorter.
BATCH, Q_LEN, KV_LEN, WINDOW = 2, 160, 208, 96
ALIGNMENT, ODD = 16, 3
# Largest accepted relative error of a result or gradient in the 2-norm, for inputs rounded to the
# dtype. In Triton's interpreter, the largest errors are about 4e-7, 5e-4 and 4e-3, and twice that
# in a smaller example.
MAX_ERROR = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The same for the gradients of query and key if the method modifies the scores. Rounding can move a
# hidden unit of DAPE's MLP across its activation's kink. There, the result and the gradient of
# value are continuous, but these jump, by up to 8e-4 for 100 random draws of the parameters of each
# version. The doctor accepts such a jump only if the error in float64 is within the limit of
# float32 above.
MAX_JUMP = 4e-3
DEVICE_TYPE = "cuda"  # tests set it to "cpu", where Triton's interpreter runs the kernels
HOW_TO_REPORT = "to report it, run `python -m kerple.doctor` and open an issue with its output"

NO_DIRECTIONS = ((0, False), (0, False))


class Variant(NamedTuple):
    """What determines the kernels of a call, besides the device.

    directions: coefficients per head that have a jacobian, and whether the table has a gradient of
        its own, of bias and weight.
    grouped: query heads share key/value heads.
    aligned: the numbers of queries and keys are multiples of ALIGNMENT.
    """

    dtype: torch.dtype
    head_size: int
    bias: bool
    weight: bool
    decay: bool
    directions: tuple[tuple[int, bool], tuple[int, bool]]
    window: bool
    grouped: bool
    documents: bool
    gradients: bool
    aligned: bool

    @classmethod
    def of(cls, call: AttentionCall) -> "Variant":
        # Without gradients, no directions are read.
        directions = NO_DIRECTIONS
        if call.training:
            directions = (
                _coefficients(call.tables.bias_jacobian),
                _coefficients(call.tables.weight_jacobian),
            )
        return cls(
            dtype=call.query.dtype,
            head_size=call.query.shape[3],
            bias=call.tables.bias is not None,
            weight=call.tables.weight is not None,
            decay=call.decay_sums is not None,
            directions=directions,
            window=call.max_kv_len < call.kv_len,
            grouped=call.queries_per_kv > 1,
            documents=call.documents is not None,
            gradients=call.training,
            aligned=call.q_len % ALIGNMENT == call.kv_len % ALIGNMENT == 0,
        )

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"head size {self.head_size}"]
        flags = ("bias", "weight", "decay", "window", "grouped", "documents", "gradients")
        parts += [name for name in flags if getattr(self, name)]
        if not self.aligned:
            parts.append(f"lengths that are not multiples of {ALIGNMENT}")
        return ", ".join(parts)


def _coefficients(jacobian: TableJacobian | None) -> tuple[int, bool]:
    """One of the `directions` of a variant."""
    if jacobian is None:
        return 0, False
    return jacobian.coefficients.shape[1], jacobian.dense > 0


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        subject: what was checked, and where.
        errors: relative error of each result and gradient; empty if the kernels raised an
            exception.
        failure: what is wrong, or None.
        seconds: duration of the check.
    """

    subject: str
    errors: dict[str, float]
    failure: str | None
    seconds: float

    def __str__(self) -> str:
        if self.failure is not None:
            return (
                f"self-check of the fused attention kernels FAILED ({self.subject}): "
                f"{self.failure}; attention-backend auto uses chunked or sdpa instead, which is "
                f"slower; {HOW_TO_REPORT}"
            )
        return (
            f"self-check of the fused attention kernels passed ({self.subject}): largest relative "
            f"error {max(self.errors.values()):.1e} ({self.seconds:.1f} s)"
        )


# The state of this process: the variants that passed, and the failures by dtype and head size.
_passed: set[tuple[torch.device, Variant]] = set()
_failures: dict[tuple[torch.dtype, int], str] = {}


def failure(requirements: Requirements) -> str | None:
    """Why the fused kernels must not run these calls, as the rest of a sentence about them; None if
    they may.
    """
    if not _failures or requirements.device is None or requirements.device.type != DEVICE_TYPE:
        return None
    for (dtype, head_size), reason in _failures.items():
        if requirements.dtype in (dtype, None) and requirements.head_size in (head_size, None):
            return f"failed its self-check: {reason}; {HOW_TO_REPORT}"
    return None


def reject(dtype: torch.dtype, head_size: int, reason: str) -> None:
    """Exclude the fused kernels for a dtype and head size, as a failed check does."""
    _failures[dtype, head_size] = reason


def rejections() -> int:
    """How many dtypes and head sizes are excluded in this process."""
    return len(_failures)


def can_check(query: Tensor) -> bool:
    """False while a CUDA graph is captured, and for tensors of other classes, such as FakeTensor,
    which have no values that could be compared.
    """
    if type(query) not in (Tensor, nn.Parameter):
        return False
    return query.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def ensure_checked(
    call: AttentionCall, fused: Backend, baseline: Backend, *, name: str = "", again: bool = False
) -> Verdict | None:
    """Check the kernels that a validated call needs, unless this process already did.

    A check waits for the GPU. Nothing is checked while torch.compile traces the call or a CUDA
    graph is captured.

    Args:
        fused, baseline: the backend to check, and the one to compare it with.
        name: of the positional method, for the message.
        again: check even if this process already did.

    Returns the verdict; None if nothing was checked. Raises RuntimeError if the kernels made the
    GPU unusable.
    """
    # Is there anything to check?
    device = call.query.device
    if torch.compiler.is_compiling() or device.type != DEVICE_TYPE:
        return None
    variant = Variant.of(call)
    failed = (variant.dtype, variant.head_size) in _failures
    if not again and (failed or (device, variant) in _passed):
        return None
    if not can_check(call.query):
        return None

    # Compare the kernels with the baseline in a small call.
    subject = ", ".join(part for part in (device_name(device), name, str(variant)) if part)
    started = time.perf_counter()
    errors: dict[str, float] = {}
    try:
        with torch.inference_mode(False):
            errors = relative_errors(small_call(call), fused, baseline, gradients=variant.gradients)
        problem = wrong_result(errors, variant.dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel that does not compile, or that the GPU rejects
        problem = describe(error)
    verdict = Verdict(subject, errors, problem, time.perf_counter() - started)
    if not verdict.errors:
        gpu_error = _gpu_error(device)
        if gpu_error is not None:
            raise RuntimeError(
                f"{verdict}. This process can no longer use the GPU. Start it again with "
                "attention-backend chunked"
            ) from gpu_error

    # Remember the result; a check with gradients covers calls without them.
    if verdict.failure is not None:
        reject(variant.dtype, variant.head_size, f"{verdict.failure} ({subject})")
    else:
        forward = variant._replace(directions=NO_DIRECTIONS, gradients=False)
        _passed.update({(device, variant), (device, forward)})
    return verdict


# -- the comparison --------------------------------------------------------------------------------


def relative_errors(
    call: AttentionCall, backend: Backend, baseline: Backend, *, gradients: bool
) -> dict[str, float]:
    """Run a call with a backend, and in float64 with the baseline. Returns the relative error in
    the 2-norm of the result and of the gradients of query, key, value, tables, coefficients of
    jacobians and decay sums, by name.
    """
    with torch.set_grad_enabled(gradients), without_autocast(call.query.device):
        actual = _results(call, backend, call.query.dtype)
        expected = _results(call, baseline, torch.float64)
        jacobians = {"bias": call.tables.bias_jacobian, "weight": call.tables.weight_jacobian}
        errors = {}
        for name, result in actual.items():
            exact = expected[name]
            which, _, what = name.partition("_")
            jacobian = jacobians.get(which)
            if jacobian is not None and what == "table":  # it has a gradient only below `dense`
                result = result[:, : jacobian.dense]
                exact = exact[:, : jacobian.dense]
            norm = exact.norm()
            if jacobian is not None and what == "coefficients":
                # The terms of a sum over distances may cancel: its error is relative to at least
                # 0.3 of the sum of their absolute values.
                terms = jacobian.directions.double() * expected[f"{which}_table"][:, None]
                norm = torch.maximum(norm, 0.3 * terms.abs().sum(dim=2).norm())
            errors[name] = ((result.double() - exact).norm() / norm.clamp(min=1e-30)).item()
        return errors


def _results(call: AttentionCall, backend: Backend, dtype: torch.dtype) -> dict[str, Tensor]:
    """The context, and the gradients if they are enabled, by the name of their tensor."""
    # The states are leaves in the dtype of the backend.
    leaves: dict[str, Tensor] = {}
    for name in ("query", "key", "value"):
        leaves[name] = getattr(call, name).detach().to(dtype).requires_grad_()
    if call.decay_sums is not None:
        leaves["decay_sums"] = call.decay_sums.detach().requires_grad_()
    arguments: dict[str, Any] = dict(leaves)

    # So are the tables, in at least float32, and the coefficients of their jacobians.
    wide = torch.promote_types(dtype, torch.float32)
    tables: dict[str, Any] = {}
    replaced = []
    for name, table, jacobian in (
        ("bias", call.tables.bias, call.tables.bias_jacobian),
        ("weight", call.tables.weight, call.tables.weight_jacobian),
    ):
        if table is None:
            continue
        table = leaves[f"{name}_table"] = table.detach().to(wide).requires_grad_()
        if jacobian is not None:
            coefficients = jacobian.coefficients.detach().to(wide).requires_grad_()
            leaves[f"{name}_coefficients"] = coefficients
            directions = jacobian.directions.detach().to(wide)
            # The same values, but with a gradient for the coefficients, for backends that do not
            # use the jacobian.
            zeros = (coefficients - coefficients.detach())[..., None]  # [h, p, 1]
            table = table + (zeros * directions).sum(dim=1)
            tables[f"{name}_jacobian"] = replace(
                jacobian, coefficients=coefficients, directions=directions
            )
            replaced.append(f"{name}_table")
        tables[name] = table
    arguments["tables"] = replace(call.tables, **tables, kernel=None)
    context = backend.compute(replace(call, **arguments))

    # Gradients for a random upstream gradient, rounded like the states.
    results = {"result": context.detach()}
    if torch.is_grad_enabled():
        upstream = _random(1, *context.shape).to(call.query).to(context)
        grads = torch.autograd.grad(context, list(leaves.values()), upstream, allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            # With a jacobian, a backend need not compute the gradient of the table.
            if grad is not None:
                results[name] = grad
            elif name not in replaced:
                raise RuntimeError(f"{backend.name} computes no gradient of {name}")
    return results


def _random(seed: int, *shape: int) -> Tensor:
    """Normal random numbers on the CPU, the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def small_call(call: AttentionCall) -> AttentionCall:
    """A call of about BATCH, Q_LEN and KV_LEN that needs the same kernels, with random states and
    the call's tables.

    Random numbers are added to the tables, so that each distance and head has its own value.
    """
    heads = call.query.shape[1]
    head_size = call.query.shape[3]
    q_len, kv_len = Q_LEN, KV_LEN
    if not Variant.of(call).aligned:
        q_len = Q_LEN - ODD
        kv_len = KV_LEN - ODD
    documents = None
    if call.documents is not None:
        # Two documents, one of more than a tile.
        q_len = kv_len
        ids = 2 * torch.arange(kv_len, device="cpu") ** 2 // kv_len**2
        documents = Documents(torch.stack((ids, ids.flip(0)))[:BATCH]).to(call.query.device)

    def states(seed: int, length: int, heads: int) -> Tensor:
        # The memory layout of a model: the heads of a position are adjacent.
        return _random(seed, BATCH, length, heads, head_size).to(call.query).transpose(1, 2)

    def resized(table: Tensor) -> Tensor:
        """The entries at distances 0 ... kv_len-1; beyond the table, its last one."""
        table = table.detach()[..., :kv_len]
        missing = table[..., -1:].expand(*table.shape[:-1], kv_len - table.shape[-1])
        return torch.cat([table, missing], dim=-1)

    # Tables, and the directions of their jacobians, for the distances of this call.
    tables: dict[str, Any] = {}
    for seed, name in ((5, "bias"), (6, "weight")):
        values = getattr(call.tables, name)
        jacobian = getattr(call.tables, f"{name}_jacobian")
        if values is not None:
            noise = _random(seed, heads, kv_len).to(values)
            tables[name] = resized(values) + 0.3 * noise
        if jacobian is not None:
            directions = resized(jacobian.directions)
            tables[f"{name}_jacobian"] = replace(jacobian, directions=directions)

    sums = None
    if call.decay_sums is not None:
        # Like those of a late part of a long text: large, with small differences.
        sums = call.decay_sums.new_full((BATCH, heads, kv_len), -4000.0)
        sums -= 0.1 * _random(7, BATCH, heads, kv_len).to(sums).abs().cumsum(dim=-1)
    span = FULL
    if call.max_kv_len < call.kv_len:
        span = Span(window=WINDOW)
    return replace(
        call,
        query=states(2, q_len, heads),
        key=states(3, kv_len, call.kv_heads),
        value=states(4, kv_len, call.kv_heads),
        tables=PositionTables(**tables, scores=call.tables.scores),
        decay_sums=sums,
        documents=documents,
        span=span,
        dropout_p=0.0,
    ).validate()


def describe(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    first_line, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first_line}"


def wrong_result(
    errors: dict[str, float], dtype: torch.dtype, *, kinks: bool = False
) -> str | None:
    """The first error that is not at most MAX_ERROR, as a sentence; None if there is none.

    kinks: whether the scores may have kinks as functions of query and key (see MAX_JUMP).
    """
    for name, error in errors.items():
        limit = MAX_ERROR[dtype]
        if kinks and name in ("query", "key"):
            limit = max(limit, MAX_JUMP)
        if error <= limit:
            continue
        # Too large, or NaN.
        what = f"the gradient of {name.replace('_', ' ')}"
        if name == "result":
            what = "the result"
        return f"{what} has a relative error of {error:.1e}, more than {limit:.0e}"
    return None


def _gpu_error(device: torch.device) -> RuntimeError | None:
    """After some errors, such as an illegal memory access, a process can no longer use its GPU."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return error
    return None


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the type of another device."""
    if device.type != "cuda":
        return device.type
    return torch.cuda.get_device_name(device)
