"""Attention on a GPU: the fused kernels against SDPA, FlexAttention and materialized scores.

DAPE-KERPLE, which mixes heads for each pair, is measured as well: in chunks that are recomputed in
the backward pass, and with all scores and MLP values in memory.

    python benchmarks/attention_gpu.py [--check] [--jobs N] [--quick] [--seconds 240] [--json FILE]
    [--dry-run]

12 heads of 64 in bfloat16; the batch size falls from 32 with the length. Forward, and forward +
backward including the gradients of the methods' tables, which all layers share in training: rows
`tables` measure how long they take, from and to the parameters. DAPE has tables of its own in each
layer. FlexAttention comes last, because it compiles. TFLOP/s count the causal half: 4 b h s^2 d / 2
forward, 3.5 times that with the backward pass. `--tune` measures other tiles of the fused kernels
instead, and their errors.
"""

import contextlib
import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.attention_inputs import (
    as_leaves,
    attend_with_method,
    layer_tables,
    random_states,
)
from benchmarks.support.gpu import Bench, close_enough
from benchmarks.support.materialized import MATERIALIZED
from kerple.attention import Attention, attend, dispatch, tables
from kerple.attention.backends.triton import launch
from kerple.attention.backends.triton.tiles import Tile, tiles_for
from kerple.doctor import run_in_processes
from kerple.positional import ModelShape, PositionalMethod, build
from megatron.utils.command_line import run_main

METHODS = ("none", "kerple_log", "kerple_power", "kerple_bias_wht", "alibi", "rpe")
LENGTHS, QUICK_LENGTHS = (2048, 8192, 512, 65_536, 16_384, 1024, 4096, 32_768), (512, 8192, 16_384)
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, SIZE = 12, 64
Row = dict[str, Any]
# Materialized alternatives that need more memory are skipped.
MATERIALIZED_BYTES = 60e9
# DAPE's 12 + 12 inputs, 32 hidden units and 12 outputs per pair, in float32 and with their
# gradients.
DAPE_PAIR_BYTES = 800
# DAPE at larger lengths would take most of the time.
DAPE_MAX_LENGTH = 8192
# (head size, queries, keys, window) that --check compares with float64.
CHECKS = [
    (64, 512, 512, None),
    (64, 700, 1001, None),
    (64, 700, 1001, 300),
    (128, 300, 300, None),
    (32, 1, 77, None),
    (80, 129, 257, 100),
    (64, 1, 1, None),
    (96, 2048, 2048, None),
]
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def half_dtype(bench: Bench) -> torch.dtype:
    """bfloat16; float16 in Triton's interpreter, which computes matrix products of bfloat16 as
    integers.
    """
    return bench.sized(torch.bfloat16, torch.float16)


def make_method(
    device: torch.device, name: str, length: int, heads: int = HEADS, size: int = SIZE
) -> PositionalMethod:
    torch.manual_seed(0)
    return build(name, ModelShape(heads, size, heads * size, 1, length)).to(device)


def alternatives(
    bench: Bench, batch: int, length: int, query: Tensor, key: Tensor, value: Tensor
) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Name -> forward pass, and the leaves of its backward pass. The baseline is the first one."""
    # A method's attention in a layer, and its tables.
    results: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {}

    def add(backend: str, method_name: str, label: str | None = None) -> None:
        method = make_method(bench.device, method_name, length)
        name = f"{label or backend}, {method_name}"
        if name == "flex, none":
            name = "flex, no positions"
        if "modify_scores" in method.hooks:
            results[name] = (
                lambda: attend_with_method(method, query, key, value, backend=backend),
                [query, key, value, *method.parameters()],
            )
            return

        # Layers share the tables, whose gradients are computed once.
        tables, table_leaves = as_leaves(layer_tables(method, length, HEADS, bench.device, backend))
        run = partial(Attention(method, backend), query, key, value, tables=tables)
        results[name] = run, [query, key, value, *table_leaves]
        if backend == "fused" and table_leaves:
            results[f"tables, {method_name}"] = (
                lambda: tables_with_gradients(method, length, bench.device),
                list(method.parameters()),
            )

    # Our kernels first, then those of PyTorch and of other packages.
    for method in bench.sized(METHODS, METHODS[:2]):
        add("fused", method)
    if not bench.dry:
        for name, backend in SDPA_BACKENDS.items():

            def sdpa(backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(query, key, value, is_causal=True)

            # Every kernel of PyTorch, without positions.
            results[f"sdpa {name}, no positions"] = (sdpa, [query, key, value])

        # FlashAttention, if installed, and FlexAttention.
        for package in ("flash_attn", "flash_attn_interface"):
            # A package for another version of torch fails in many ways.
            with contextlib.suppress(Exception):
                run = importlib.import_module(package).flash_attn_func
                results[package] = (partial(_flash, run, query, key, value), [query, key, value])
        flex_methods = ["none", "kerple_log", "kerple_bias_wht"]
        if bench.options.quick:
            flex_methods = ["kerple_log"]
        for method in flex_methods:
            add("flex", method)

    # Attention with all logits in memory, at lengths where that is possible.
    if bench.options.quick:
        return results
    if batch * HEADS * length**2 * 14 < MATERIALIZED_BYTES:
        for method in ("kerple_log", "kerple_bias_wht"):
            add(MATERIALIZED.name, method)
    if length <= DAPE_MAX_LENGTH:
        add("chunked", "dape_kerple")
    if batch * length**2 * DAPE_PAIR_BYTES < MATERIALIZED_BYTES:
        add("reference", "dape_kerple", label="materialized")
    return results


def tables_with_gradients(method: PositionalMethod, length: int, device: torch.device) -> Tensor:
    """A sum of all that the kernels give gradients of, in the place of their backward pass."""
    kernel = layer_tables(method, length, HEADS, device, "fused").kernel
    assert kernel is not None
    return torch.stack([tensor.sum() for tensor in kernel[:4] if tensor is not None]).sum()


def _flash(run: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention's own package, which takes `[b, s, h, d]`."""
    return run(*(states.transpose(1, 2) for states in (query, key, value)), causal=True).transpose(
        1, 2
    )


def table_errors(
    method: PositionalMethod,
    states: Sequence[Tensor],
    upstream: Tensor,
    window: int | None,
    tolerance: float,
) -> list[tuple[bool, float]]:
    """Errors of the result and of the gradients of query, key, value and tables."""
    length = window or states[1].shape[2]
    named = zip(("bias", "weight"), tables(method, length, states[0].device), strict=True)
    present = [(name, table) for name, table in named if table is not None]
    runs = []
    for backend, dtype in (("fused", states[0].dtype), ("reference", torch.float64)):
        leaves = [part.detach().to(dtype).requires_grad_() for part in states]
        precision = torch.promote_types(dtype, torch.float32)
        copies = {name: table.detach().to(precision).requires_grad_() for name, table in present}
        bias, weight = copies.get("bias"), copies.get("weight")
        result = attend(
            *leaves, bias_table=bias, weight_table=weight, window=window, backend=backend
        )
        leaves += copies.values()
        runs.append([result, *torch.autograd.grad(result, leaves, upstream.to(dtype))])
    return [close_enough(actual, exact, tolerance) for actual, exact in zip(*runs, strict=True)]


def parameter_errors(
    name: str, states: Sequence[Tensor], upstream: Tensor, window: int | None, tolerance: float
) -> list[tuple[bool, float]]:
    """Errors of the gradients of a method's parameters, computed as in training, by jacobians."""
    t, size = states[1].shape[2:]
    length = window or t
    runs = []
    for backend in ("fused", "reference"):
        method = make_method(states[0].device, name, t, states[1].shape[1], size)
        parameters = list(method.parameters())
        if not parameters:
            return []
        if backend == "fused":
            result = attend_with_method(
                method, *(part.detach() for part in states), backend=backend, window=window
            )
        else:
            named = zip(("bias", "weight"), tables(method, length, states[0].device), strict=True)
            present = {name: table.double() for name, table in named if table is not None}
            bias, weight = present.get("bias"), present.get("weight")
            exact = [part.detach().double() for part in states]
            result = attend(
                *exact, bias_table=bias, weight_table=weight, window=window, backend=backend
            )
        runs.append(torch.autograd.grad(result, parameters, upstream.to(result.dtype)))
    return [close_enough(actual, exact, tolerance) for actual, exact in zip(*runs, strict=True)]


def case_row(sizes: tuple[int, int, int, int | None], name: str, dtype: torch.dtype) -> Row:
    size, s, t, window = sizes
    return {"check": name, "dtype": str(dtype), "size": size, "s": s, "t": t, "window": window}


def crashed_case(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int | None], name: str
) -> Row:
    """The row of a check whose process has ended."""
    return {**case_row(sizes, name, dtype), "ok": False, "failed": "its process ended"}


def check_case(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int | None], name: str
) -> Row:
    """Compare the fused kernels with the reference for one method: its row of the results."""
    size, s, t, window = sizes
    row = case_row(sizes, name, dtype)
    try:
        *states, upstream = random_states(2, 3, s, t, size, dtype=dtype, device=device)
        method = make_method(device, name, t, 3, size)
        errors = table_errors(method, states, upstream, window, TOLERANCES[dtype])
        errors += parameter_errors(name, states, upstream, window, TOLERANCES[dtype])
    except Exception as error:  # a kernel that does not compile must not hide the other results
        return {**row, "ok": False, "failed": f"{type(error).__name__}: {error}"[:300]}

    # With one key the softmax is constant: its gradients are zero except for rounding.
    compared = errors if t > 1 else errors[:1]
    ok = all(close for close, _ in compared)
    return {**row, "ok": ok, "errors": [error for _, error in errors]}


def check(bench: Bench) -> bool:
    """Compare results and all gradients of the fused kernels with the reference in float64."""
    cases = itertools.product(
        [bench.device],
        bench.sized(list(TOLERANCES), [torch.float16]),
        bench.sized(CHECKS, [(16, 20, 40, None)]),
        ("none", "kerple_log", "kerple_power__ap", "kerple_bias_wht", "rpe"),
    )
    passed = True
    for row in run_in_processes(check_case, list(cases), bench.options.jobs, crashed_case):
        passed &= row["ok"]
        bench.attempt(row, dict)
    same = True
    if not bench.dry:
        method = make_method(bench.device, "kerple_bias_wht", 70)
        *states, upstream = random_states(
            2, HEADS, 70, 70, SIZE, dtype=torch.bfloat16, device=bench.device
        )
        leaves = [*states, *method.parameters()]
        results = (attend_with_method(method, *states, backend="fused") for _ in range(2))
        first, second = (torch.autograd.grad(result, leaves, upstream) for result in results)
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return bench.record_check(passed and same, second_run_bit_equal=same)


def tune(bench: Bench) -> None:
    """Measure forward, forward + backward, and errors, with one field of `Tiles` changed at a time.

    Tiles of `key_value` with four warps let two or more programs share a multiprocessor.
    """
    # The tiles to try in half precision, by field.
    half_candidates: dict[str, list[Any]] = {
        "forward": [
            Tile(128, 64, 4, 2),
            Tile(128, 64, 8, 3),
            Tile(128, 128, 8, 2),
            Tile(64, 64, 4, 3),
        ],
        "key_value": [
            Tile(64, 64, 4, 2),
            Tile(64, 64, 4, 1),
            Tile(32, 64, 4, 2),
            Tile(64, 128, 8, 1),
        ],
        "query": [
            Tile(64, 64, 4, 2),
            Tile(128, 64, 4, 2),
            Tile(128, 64, 8, 3),
            Tile(128, 32, 4, 2),
        ],
        "tables": [
            Tile(128, 128, 8, 2),
            Tile(128, 128, 16, 2),
            Tile(64, 64, 8, 2),
            Tile(64, 64, 4, 3),
        ],
    }

    # Float32 has one other choice: the precision of its products.
    length, batch = bench.sized((4096, 8), (128, 1))
    candidates = ((half_dtype(bench), half_candidates), (torch.float32, {"precision": ["tf32x3"]}))
    for name, (dtype, slots) in itertools.product(("kerple_log", "kerple_bias_wht"), candidates):
        # The default arguments bind the values of this iteration.
        query, key, value, upstream = random_states(
            batch, HEADS, length, length, SIZE, dtype=dtype, device=bench.device
        )
        method = make_method(bench.device, name, length)
        leaves = [query, key, value, *method.parameters()]

        def forward(method=method, states=(query, key, value)) -> Tensor:
            return attend_with_method(method, *states, backend="fused")

        def forward_backward(forward=forward, leaves=leaves, upstream=upstream) -> None:
            torch.autograd.grad(forward(), leaves, upstream)

        def errors(
            method=method, tensors=(query, key, value, upstream), dtype=dtype
        ) -> list[float]:
            *states, grad = (tensor[:1] for tensor in tensors)
            compared = table_errors(method, states, grad, None, TOLERANCES[dtype])
            return [error for _, error in compared]

        # Replace one field of the tiles, and measure.
        for slot, tiles in {"default": [None], **slots}.items():
            for tile in bench.sized(tiles, tiles[:1]):

                def changed_tiles(*args, slot=slot, tile=tile, **options):
                    tiles = tiles_for(*args, **options)
                    if tile is None:
                        return tiles
                    return type(tiles)(**{**vars(tiles), slot: tile})

                def measure(forward=forward, both=forward_backward, errors=errors) -> Row:
                    forward_ms = bench.measure(torch.no_grad()(forward))[0] * 1e3
                    return {
                        "forward_ms": forward_ms,
                        "both_ms": bench.measure(both)[0] * 1e3,
                        "errors": errors(),
                    }

                row = {"tune": name, "dtype": str(dtype), "slot": slot, "tile": str(tile)}
                with patch.object(launch, "tiles_for", changed_tiles):
                    bench.attempt(row, measure)


def main() -> int:
    # Wrong results need no measurement.
    bench = Bench(__doc__, "attention_gpu.json")
    dispatch.BACKENDS[MATERIALIZED.name] = MATERIALIZED
    if bench.options.check and not check(bench):
        return 1
    if bench.options.tune:
        tune(bench)
        return 0

    # FlexAttention compiles for each length, so all other rows come before its rows.
    lengths = QUICK_LENGTHS if bench.options.quick else LENGTHS
    baselines: dict[tuple[int, str], float] = {}
    for flex in (False, True):
        for length in bench.sized(lengths, (32,)):
            measure_length(bench, length, baselines, flex=flex)
    return 0


def measure_length(
    bench: Bench, length: int, baselines: dict[tuple[int, str], float], *, flex: bool
) -> None:
    """All alternatives at a length: only FlexAttention, or only the others. baselines: (length,
    pass) -> seconds.
    """
    # The same number of tokens at every length, up to a limit.
    batch = bench.sized(min(32, max(1, 65_536 // length)), 1)
    query, key, value, upstream = random_states(
        batch, HEADS, length, length, SIZE, dtype=half_dtype(bench), device=bench.device
    )
    flops = 4 * batch * HEADS * length**2 * SIZE / 2
    for name, (forward, leaves) in alternatives(bench, batch, length, query, key, value).items():
        if name.startswith("flex") != flex:
            continue

        # The default arguments bind the values of this iteration.
        def forward_backward(forward=forward, leaves=leaves) -> None:
            result = forward()
            gradient = upstream if result.dim() else None  # of a scalar: 1
            torch.autograd.grad(result, leaves, gradient)

        # Backward passes have 2.5 times the operations of forward passes.
        passes = (
            ("forward", torch.no_grad()(forward), 1.0),
            ("forward+backward", forward_backward, 3.5),
        )
        for kind, run, factor in passes:

            def measure(run=run, kind=kind, factor=factor, name=name) -> dict[str, object]:
                seconds, peak = bench.measure(run)
                if name == "fused, none":
                    baselines[length, kind] = seconds
                tflops = ratio = None
                if not name.startswith("tables"):
                    tflops = factor * flops / seconds / 1e12
                if (length, kind) in baselines:
                    ratio = seconds / baselines[length, kind]
                return {
                    "ms": seconds * 1e3,
                    "tflops": tflops,
                    "peak_mib": peak / 2**20,
                    "ratio_to_fused_none": ratio,
                }

            bench.attempt({"length": length, "batch": batch, "pass": kind, "name": name}, measure)


if __name__ == "__main__":
    sys.exit(run_main(main))
