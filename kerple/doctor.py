"""Check attention on this machine, and print what a bug report needs.

    kerple doctor [--head-size D ...] [--jobs N] [--json FILE]

On a GPU, every positional method is checked in float32, float16 and bfloat16, results and
gradients, with as many key/value heads as query heads and with half as many (grouped-query
attention): the fused kernels by their self-check (`kerple.attention.self_check`), and the chunked
backend for methods that they do not support. Without a GPU, the chunked and sdpa backends are
checked. The exit status is 1 if a check fails. Most of the time is compilation, which --jobs
processes share.
"""

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.collect_env import get_pretty_env_info

from kerple import __version__
from kerple.attention import (
    AttentionCall,
    ExpectedCalls,
    Requirements,
    check_kernels,
    position_tables,
    self_check,
)
from kerple.attention.dispatch import BACKENDS
from kerple.attention.self_check import (
    HOW_TO_REPORT,
    KV_LEN,
    describe,
    relative_errors,
    small_call,
    wrong_result,
)
from kerple.positional import ModelShape, PositionalMethod, build, primary_names

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = 4
KV_HEADS = (HEADS, HEADS // 2)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Check:
    """The check of one method in one dtype.

    Attributes:
        backends: what was compared with the reference, or with the chunked backend for fused.
        errors: largest relative errors of the result and each gradient.
        failure: what is wrong, or None.
        unsupported: why fused does not support the method here, or None.
    """

    device: str
    method: str
    dtype: str
    head_size: int
    backends: list[str]
    errors: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    unsupported: str | None = None

    def cell(self, note: str) -> str:
        """The text of the check in a table."""
        error = "passed"
        if self.failure is not None:
            error = "FAILED"
        elif self.errors:
            error = f"{max(self.errors.values()):.1e}"
        return f"{'+'.join(self.backends)} {error}{note}"


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def main(
    argv: Sequence[str] | None = None,
    more: Callable[[torch.device], list[list[Check]]] | None = None,
    parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """Returns the exit status. more: further checks, a row per kernel and a column per dtype."""
    parser = parser_class(prog="kerple doctor", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--head-size",
        type=int,
        nargs="+",
        default=[64],
        metavar="D",
        help="head sizes; default: 64",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes; default: 1")
    parser.add_argument(
        "--json", type=_path, metavar="FILE", help="also write the results to a file"
    )
    options = parser.parse_args(argv)

    # Reject what would fail only after minutes of checks.
    if any(size < 4 or size % 2 for size in options.head_size):
        parser.error("--head-size: rotary methods need even head sizes of at least 4")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: at least 1")
    path = options.json
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        parser.error(f"--json: {path} is not a file in a folder that exists")

    # Describe the machine, for bug reports.
    machine = f"kerple-neox version: {__version__}\n{get_pretty_env_info()}"
    for package in ("deepspeed", "megatron-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            machine += f"\n{package} version: {importlib.metadata.version(package)}"
    print(machine)
    devices = _devices()
    if devices == [torch.device("cpu")]:
        print(
            "\nThere is no GPU that torch can use: the fused kernels are not checked, only chunked "
            "and sdpa on the CPU."
        )

    # One table per device and head size, as soon as it is measured.
    checks: list[Check] = []
    for device in devices:
        rows: list[list[Check]] = []
        if more is not None:
            rows = more(device)
        for head_size in options.head_size:
            started = time.perf_counter()
            kinds = itertools.product(primary_names(), [device], DTYPES, [head_size])
            new = run_in_processes(check_method, list(kinds), options.jobs, crashed_check)
            for first in range(0, len(new), len(DTYPES)):
                rows.append(new[first : first + len(DTYPES)])
            checks += itertools.chain.from_iterable(rows)
            print_table(rows)
            rows = []
            print(f"({time.perf_counter() - started:.0f} s)")

    # The summary.
    failed = sum(check.failure is not None for check in checks)
    if path is not None:
        results = [asdict(check) for check in checks]
        text = json.dumps({"machine": machine, "checks": results, "passed": not failed}, indent=1)
        path.write_text(text + "\n")
    if failed:
        print(f"\n{failed} of {len(checks)} checks FAILED; {HOW_TO_REPORT}")
        return 1
    print(f"\nall {len(checks)} checks passed")
    return 0


def run_in_processes(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    jobs: int,
    crashed: Callable[..., Result],
) -> list[Result]:
    """The results of calls with these arguments, in their order, from several processes; in this
    one if `jobs` is 1.

    crashed: gives the result of a call whose process ends, as by a segmentation fault.
    """
    if jobs == 1:
        return [function(*arguments) for arguments in calls]

    # New processes, because a fork cannot use the GPU of its parent.
    context = multiprocessing.get_context("spawn")
    results: dict[int, Result] = {}
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(function, *arguments) for arguments in calls]
        for index, future in enumerate(futures):
            with contextlib.suppress(BrokenProcessPool):
                results[index] = future.result()

    # A process that ends breaks the pool. The calls without a result then get one process each.
    def alone(index: int) -> Result:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                return pool.submit(function, *calls[index]).result()
            except BrokenProcessPool:
                return crashed(*calls[index])

    unfinished = [index for index in range(len(calls)) if index not in results]
    with ThreadPoolExecutor(jobs) as threads:
        results |= zip(unfinished, threads.map(alone, unfinished), strict=True)
    return [results[index] for index in range(len(calls))]


def _devices() -> list[torch.device]:
    """The first GPU of each kind; the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    # GPUs of the same name are expected to behave the same.
    kinds: dict[str, torch.device] = {}
    for index in range(torch.cuda.device_count()):
        kinds.setdefault(torch.cuda.get_device_name(index), torch.device("cuda", index))
    return list(kinds.values())


# -- the checks ------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute convolutions and matrix products of float32 in float32. PyTorch's default for cuDNN
    is TF32, whose rounding errors exceed the tolerance.
    """
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    try:
        cudnn.allow_tf32 = matmul.allow_tf32 = False
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


@without_tf32()
def check_method(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Check:
    """Check the backends that `auto` can choose for a method on a device, with parameters that are
    always the same.
    """
    # Attention with this method in training.
    method = build(name, ModelShape(HEADS, head_size, HEADS * head_size, 2, KV_LEN))
    method.reset_parameters(torch.Generator().manual_seed(0))
    method = method.to(device)
    requirements = Requirements.of(
        method, training=True, dtype=dtype, head_size=head_size, batch_heads=HEADS, device=device
    )

    # The backends that `auto` can choose.
    unsupported = BACKENDS["fused"].unsupported_reason(requirements)
    backends = ["chunked"]
    if unsupported is None and device.type == self_check.DEVICE_TYPE:
        backends = ["fused"]
    elif device.type == "cpu" and BACKENDS["sdpa"].unsupported_reason(requirements) is None:
        backends.append("sdpa")
    kind = str(dtype).removeprefix("torch.")
    device_name = self_check.device_name(device)
    check = Check(device_name, name, kind, head_size, backends, unsupported=unsupported)

    # Compare them with the reference.
    try:
        if backends == ["fused"]:
            return _check_fused(check, method, device, dtype)

        def measure(dtype: torch.dtype) -> dict[str, float]:
            """The errors of a call with the method's tables, and with decays if it has any. Queries
            and keys are those after its `rotate`.
            """
            errors: dict[str, float] = {}
            query = torch.empty(1, HEADS, KV_LEN, head_size, dtype=dtype, device=device)
            tables = position_tables(method, KV_LEN, device)
            sums = None
            if requirements.decay:
                sums = query.new_zeros(1, HEADS, KV_LEN, dtype=torch.float64)
            for kv_heads, backend in itertools.product(KV_HEADS, backends):
                key = query[:, :kv_heads]
                call = AttentionCall(
                    query=query,
                    key=key,
                    value=key,
                    scale=head_size**-0.5,
                    method=method,
                    tables=tables,
                    decay_sums=sums,
                )
                call = small_call(call)
                positions = torch.arange(call.kv_len, device="cpu")
                with torch.no_grad():
                    rotated = method.rotate(
                        call.query, call.key, positions[call.offset :], positions
                    )
                call = replace(call, query=rotated[0], key=rotated[1])
                compared = BACKENDS[backend], BACKENDS["reference"]
                errors = _largest(errors, relative_errors(call, *compared, gradients=True))
            return errors

        errors = measure(dtype)
        failure = wrong_result(errors, dtype)
        if failure is not None and requirements.modify_scores:
            # In float64, the gradients have no jumps due to rounding.
            failure = wrong_result(errors, dtype, kinks=True)
            failure = failure or wrong_result(measure(torch.float64), torch.float32)
        return replace(check, errors=errors, failure=failure)
    except Exception as error:  # this method must not hide the results of the others
        return replace(check, failure=describe(error))


def crashed_check(name: str, device: torch.device, dtype: torch.dtype, head_size: int) -> Check:
    """The result of `check_method` in a process that has ended."""
    kind = str(dtype).removeprefix("torch.")
    failure = "the process of this check ended, as by a segmentation fault"
    return Check(
        self_check.device_name(device), name, kind, head_size, ["process"], failure=failure
    )


def _check_fused(
    check: Check, method: PositionalMethod, device: torch.device, dtype: torch.dtype
) -> Check:
    """The same check with the results of the fused kernels, in training and in decoding."""
    for training, kv_heads in itertools.product((True, False), KV_HEADS):
        expected = ExpectedCalls(
            method=method,
            heads=HEADS,
            kv_heads=kv_heads,
            head_size=check.head_size,
            device=device,
            dtype=dtype,
            training=training,
        )
        for verdict in check_kernels(expected, "fused", again=True):
            failure = verdict.failure
            if failure is not None and kv_heads < HEADS:
                failure = f"{failure} (grouped queries)"
            errors = _largest(check.errors, verdict.errors)
            check = replace(check, errors=errors, failure=check.failure or failure)
    return check


def _largest(errors: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    """The larger error of each name; infinite instead of NaN, which `max` would drop."""
    largest = dict(errors)
    for name, error in others.items():
        if math.isnan(error):
            error = math.inf
        largest[name] = max(errors.get(name, 0.0), error)
    return largest


def print_table(rows: list[list[Check]]) -> None:
    """Print a row per method and a column per dtype, and notes about failures and about what fused
    does not support.
    """
    last = rows[-1][0]  # the first rows may be of other kernels
    print(
        f"\nattention on {last.device}, head size {last.head_size}: backend, and largest relative "
        "error of the result\nand the gradients of query, key, value and tables\n"
    )
    notes: dict[str, int] = {}

    def cell(check: Check) -> str:
        text = check.failure
        if text is None and check.unsupported is not None and check.device != "cpu":
            text = f"fused {check.unsupported}"
        if text is None:
            return check.cell("")
        number = notes.setdefault(text, len(notes) + 1)
        return check.cell(f" [{number}]")

    # Columns as wide as their longest cell.
    lines = [["method", *(check.dtype for check in rows[0])]]
    lines += [[row[0].method, *map(cell, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [text.ljust(width) for text, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
    for text, number in notes.items():
        print(f"[{number}] {text}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
