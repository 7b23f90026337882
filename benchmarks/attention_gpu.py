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
from dataclasses import replace
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
    gradient_step,
    layer_tables,
    random_states,
)
from benchmarks.support.gpu import Bench, Row, close_enough
from benchmarks.support.materialized import MATERIALIZED
from kerple.attention import Attention, attend, dispatch, tables
from kerple.attention.backends.triton import launch
from kerple.attention.backends.triton.tiles import Tile, Tiles, tiles_for
from kerple.doctor import run_in_processes
from kerple.positional import ModelShape, PositionalMethod, build
from megatron.utils.command_line import run_main

METHODS = ("none", "kerple_log", "kerple_power", "kerple_bias_wht", "alibi", "rpe")
FLEX_METHODS = ("none", "kerple_log", "kerple_bias_wht")
LENGTHS = (2048, 8192, 512, 65_536, 16_384, 1024, 4096, 32_768)
QUICK_LENGTHS = (512, 8192, 16_384)
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, SIZE = 12, 64
# Rows that are not named after their backend and method.
ROW_NAMES = {
    "flex, none": "flex, no positions",
    "reference, dape_kerple": "materialized, dape_kerple",
}
# Materialized alternatives that need more memory are skipped.
MATERIALIZED_BYTES = 60e9
# DAPE's 12 + 12 inputs, 32 hidden units and 12 outputs per pair, in float32 and with their
# gradients.
DAPE_PAIR_BYTES = 800
# DAPE at larger lengths would take most of the time.
DAPE_MAX_LENGTH = 8192
# Head size, queries, keys, window.
Sizes = tuple[int, int, int, int | None]
# What --check compares with float64.
CHECKS: list[Sizes] = [
    (64, 512, 512, None),
    (64, 700, 1001, None),
    (64, 700, 1001, 300),
    (128, 300, 300, None),
    (32, 1, 77, None),
    (80, 129, 257, 100),
    (64, 1, 1, None),
    (96, 2048, 2048, None),
]
CHECKED_METHODS = ("none", "kerple_log", "kerple_power__ap", "kerple_bias_wht", "rpe")
TOLERANCES = {
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
}
# The tiles that --tune tries in half precision, by field of `Tiles`. Tiles of `key_value` with four
# warps let two or more programs share a multiprocessor.
HALF_TILES = {
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
# Name -> forward pass, and the leaves of its backward pass.
Alternatives = dict[str, tuple[Callable[[], Tensor], list[Tensor]]]
# Whether a result is close to the exact one, and its error.
Errors = list[tuple[bool, float]]
# Length and pass -> seconds.
Baselines = dict[tuple[int, str], float]


def half_dtype(bench: Bench) -> torch.dtype:
    """bfloat16; float16 in Triton's interpreter, which computes matrix products of bfloat16 as
    integers.
    """
    return bench.sized(torch.bfloat16, torch.float16)


def make_method(
    device: torch.device, name: str, length: int, heads: int = HEADS, size: int = SIZE
) -> PositionalMethod:
    torch.manual_seed(0)
    shape = ModelShape(heads, size, heads * size, 1, length)
    return build(name, shape).to(device)


def model_states(
    device: torch.device, batch: int, length: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Query, key, value and an upstream gradient with the heads of the model."""
    return random_states(batch, HEADS, length, length, SIZE, dtype=dtype, device=device)


def method_alternatives(backend: str, method_name: str, states: list[Tensor]) -> Alternatives:
    """A method's attention in a layer; for the fused kernels also its tables."""
    device, length = states[0].device, states[0].shape[2]
    method = make_method(device, method_name, length)
    parameters: list[Tensor] = list(method.parameters())
    layer = Attention(method, backend)
    name = f"{backend}, {method_name}"
    name = ROW_NAMES.get(name, name)
    if "modify_scores" in method.hooks:
        return {name: (partial(layer, *states), states + parameters)}

    # Layers share the tables, whose gradients are computed once.
    found = layer_tables(method, length, HEADS, device, backend)
    shared, leaves = as_leaves(found)
    forward = partial(layer, *states, tables=shared)
    results: Alternatives = {name: (forward, states + leaves)}
    if backend == "fused" and leaves:
        run = partial(tables_with_gradients, method, length, device)
        results[f"tables, {method_name}"] = run, parameters
    return results


def other_kernels(states: list[Tensor]) -> Alternatives:
    """Every kernel of PyTorch, and FlashAttention if installed, without positions."""
    results: Alternatives = {}
    for name, backend in SDPA_BACKENDS.items():
        results[f"sdpa {name}, no positions"] = partial(_sdpa, backend, *states), states
    for package in ("flash_attn", "flash_attn_interface"):
        # A package for another version of torch fails in many ways.
        with contextlib.suppress(Exception):
            run = importlib.import_module(package).flash_attn_func
            results[package] = partial(_flash, run, *states), states
    return results


def _sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _flash(run: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """FlashAttention's own package, which takes `[b, s, h, d]`."""
    transposed = [part.transpose(1, 2) for part in states]
    return run(*transposed, causal=True).transpose(1, 2)


def alternatives(bench: Bench, states: list[Tensor]) -> Alternatives:
    """All but FlexAttention. The baseline is the first one."""
    # Our kernels first, then those of PyTorch and of other packages.
    results: Alternatives = {}
    for method in bench.sized(METHODS, METHODS[:2]):
        results |= method_alternatives("fused", method, states)
    if not bench.dry:
        results |= other_kernels(states)
    if bench.options.quick:
        return results

    # Attention with all logits in memory, at lengths where that is possible.
    batch, heads, length, _ = states[0].shape
    pairs = batch * length**2
    cases = []
    if pairs * heads * 14 < MATERIALIZED_BYTES:
        cases += [(MATERIALIZED.name, "kerple_log"), (MATERIALIZED.name, "kerple_bias_wht")]
    if length <= DAPE_MAX_LENGTH:
        cases.append(("chunked", "dape_kerple"))
    if pairs * DAPE_PAIR_BYTES < MATERIALIZED_BYTES:
        cases.append(("reference", "dape_kerple"))
    for backend, method in cases:
        results |= method_alternatives(backend, method, states)
    return results


def flex_alternatives(bench: Bench, states: list[Tensor]) -> Alternatives:
    """FlexAttention, which only GPUs have."""
    results: Alternatives = {}
    methods = bench.sized(FLEX_METHODS, ())
    if bench.options.quick and methods:
        methods = ("kerple_log",)
    for method in methods:
        results |= method_alternatives("flex", method, states)
    return results


def tables_with_gradients(method: PositionalMethod, length: int, device: torch.device) -> Tensor:
    """A sum of all that the kernels give gradients of, in the place of their backward pass."""
    kernel = layer_tables(method, length, HEADS, device, "fused").kernel
    assert kernel is not None
    sums = [tensor.sum() for tensor in kernel[:4] if tensor is not None]
    return torch.stack(sums).sum()


def named_tables(method: PositionalMethod, length: int, device: torch.device) -> dict[str, Tensor]:
    """The tables that a method has, by argument of `attend`."""
    bias, weight = tables(method, length, device)
    named = {}
    if bias is not None:
        named["bias_table"] = bias
    if weight is not None:
        named["weight_table"] = weight
    return named


def table_errors(
    method: PositionalMethod, states: list[Tensor], upstream: Tensor, window: int | None
) -> Errors:
    """Errors of the result and of the gradients of query, key, value and tables."""
    key = states[1]
    present = named_tables(method, window or key.shape[2], key.device)
    runs = []
    for backend, dtype in (("fused", key.dtype), ("reference", torch.float64)):
        # Tables are at least float32.
        precision = torch.promote_types(dtype, torch.float32)
        leaves = [part.detach().to(dtype).requires_grad_() for part in states]
        copies: dict[str, Any] = {}
        for name, table in present.items():
            copies[name] = table.detach().to(precision).requires_grad_()
        result = attend(*leaves, **copies, window=window, backend=backend)
        leaves += copies.values()
        gradients = torch.autograd.grad(result, leaves, upstream.to(dtype))
        runs.append([result, *gradients])
    return _compared(runs, key.dtype)


def parameter_errors(
    method: PositionalMethod, states: list[Tensor], upstream: Tensor, window: int | None
) -> Errors:
    """Errors of the gradients of a method's parameters, computed as in training, by jacobians."""
    parameters = list(method.parameters())
    if not parameters:
        return []
    detached = [part.detach() for part in states]
    key = detached[1]
    fused = Attention(method, "fused")(*detached, window=window)

    # The reference differentiates through the tables.
    present = named_tables(method, window or key.shape[2], key.device)
    doubled: dict[str, Any] = {name: table.double() for name, table in present.items()}
    exact = [part.double() for part in detached]
    reference = attend(*exact, **doubled, window=window, backend="reference")
    runs = []
    for result in (fused, reference):
        gradient = upstream.to(result.dtype)
        runs.append(torch.autograd.grad(result, parameters, gradient))
    return _compared(runs, key.dtype)


def _compared(runs: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Errors:
    """The errors of the first run, compared with the second one."""
    errors = []
    for actual, exact in zip(*runs, strict=True):
        errors.append(close_enough(actual, exact, TOLERANCES[dtype]))
    return errors


def case_row(sizes: Sizes, name: str, dtype: torch.dtype) -> Row:
    size, s, t, window = sizes
    return {
        "check": name,
        "dtype": str(dtype),
        "size": size,
        "s": s,
        "t": t,
        "window": window,
    }


def crashed_case(device: torch.device, dtype: torch.dtype, sizes: Sizes, name: str) -> Row:
    """The row of a check whose process has ended."""
    row = case_row(sizes, name, dtype)
    return {**row, "ok": False, "failed": "its process ended"}


def check_case(device: torch.device, dtype: torch.dtype, sizes: Sizes, name: str) -> Row:
    """Compare the fused kernels with the reference for one method: its row of the results."""
    size, s, t, window = sizes
    row = case_row(sizes, name, dtype)
    try:
        *states, upstream = random_states(2, 3, s, t, size, dtype=dtype, device=device)
        method = make_method(device, name, t, 3, size)
        errors = table_errors(method, states, upstream, window)
        errors += parameter_errors(method, states, upstream, window)
    except Exception as error:  # a kernel that does not compile must not hide the other results
        failed = f"{type(error).__name__}: {error}"
        return {**row, "ok": False, "failed": failed[:300]}

    # With one key the softmax is constant: its gradients are zero except for rounding.
    compared = errors
    if t == 1:
        compared = errors[:1]
    row["ok"] = all(close for close, _ in compared)
    row["errors"] = [error for _, error in errors]
    return row


def check(bench: Bench) -> bool:
    """Compare results and all gradients of the fused kernels with the reference in float64."""
    dtypes = bench.sized(list(TOLERANCES), [torch.float16])
    sizes: list[Sizes] = bench.sized(CHECKS, [(16, 20, 40, None)])
    cases = list(itertools.product([bench.device], dtypes, sizes, CHECKED_METHODS))
    passed = True
    for row in run_in_processes(check_case, cases, bench.options.jobs, crashed_case):
        passed &= row["ok"]
        bench.add(row)
    same = bench.dry or runs_are_bit_equal(bench.device)
    return bench.record_check(passed and same, second_run_bit_equal=same)


def runs_are_bit_equal(device: torch.device) -> bool:
    """Whether two runs of the fused kernels have the same gradients, bit by bit."""
    method = make_method(device, "kerple_bias_wht", 70)
    *states, upstream = model_states(device, 2, 70, torch.bfloat16)
    leaves = [*states, *method.parameters()]
    layer = Attention(method, "fused")
    first = torch.autograd.grad(layer(*states), leaves, upstream)
    second = torch.autograd.grad(layer(*states), leaves, upstream)
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def tune(bench: Bench) -> None:
    """Measure forward, forward + backward, and errors, with one field of `Tiles` changed at a
    time.
    """
    # Float32 has one other choice: the precision of its products.
    searches: list[tuple[torch.dtype, dict[str, list[Any]]]] = [
        (half_dtype(bench), {"default": [None], **HALF_TILES}),
        (torch.float32, {"default": [None], "precision": ["tf32x3"]}),
    ]
    length, batch = bench.sized((4096, 8), (128, 1))
    for name, (dtype, slots) in itertools.product(("kerple_log", "kerple_bias_wht"), searches):
        method = make_method(bench.device, name, length)
        states = model_states(bench.device, batch, length, dtype)
        measure = partial(measure_tiles, bench, method, states)
        for slot, tiles in slots.items():
            for tile in bench.sized(tiles, tiles[:1]):
                row = {"tune": name, "dtype": str(dtype), "slot": slot, "tile": str(tile)}
                replacement = partial(changed_tiles, slot, tile)
                with patch.object(launch, "tiles_for", replacement):
                    bench.attempt(row, measure)


def changed_tiles(slot: str, tile: Any, *arguments: Any, **options: Any) -> Tiles:
    """What `tiles_for` returns, with one field replaced; unchanged if `tile` is None."""
    tiles = tiles_for(*arguments, **options)
    if tile is None:
        return tiles
    return replace(tiles, **{slot: tile})


def measure_tiles(bench: Bench, method: PositionalMethod, tensors: Sequence[Tensor]) -> Row:
    """The times and errors of query, key, value and upstream gradient."""
    *states, upstream = tensors
    forward = partial(Attention(method, "fused"), *states)
    leaves = [*states, *method.parameters()]
    forward_seconds, _ = bench.measure(torch.no_grad()(forward))
    both_seconds, _ = bench.measure(gradient_step(forward, leaves, upstream))

    # The errors of the first row of the batch.
    *states, upstream = (tensor[:1] for tensor in tensors)
    compared = table_errors(method, states, upstream, None)
    return {
        "forward_ms": forward_seconds * 1e3,
        "both_ms": both_seconds * 1e3,
        "errors": [error for _, error in compared],
    }


def measure_length(bench: Bench, length: int, flex: bool, baselines: Baselines) -> None:
    """All alternatives at a length: only FlexAttention, or only the others."""
    # The same number of tokens at every length, up to a limit.
    rows = max(1, 65_536 // length)
    batch = bench.sized(min(32, rows), 1)
    *states, upstream = model_states(bench.device, batch, length, half_dtype(bench))
    if flex:
        found = flex_alternatives(bench, states)
    else:
        found = alternatives(bench, states)

    # Backward passes have 2.5 times the operations of forward passes.
    flops = 4 * batch * HEADS * length**2 * SIZE / 2
    for name, (forward, leaves) in found.items():
        gradient: Tensor | None = upstream
        if name.startswith("tables"):
            gradient = None
        both = gradient_step(forward, leaves, gradient)
        passes = (
            ("forward", torch.no_grad()(forward), flops),
            ("forward+backward", both, 3.5 * flops),
        )
        for kind, run, operations in passes:
            row = {"length": length, "batch": batch, "pass": kind, "name": name}
            measure = partial(measure_pass, bench, row, run, operations, baselines)
            bench.attempt(row, measure)


def measure_pass(
    bench: Bench,
    row: Row,
    run: Callable[[], object],
    flops: float,
    baselines: Baselines,
) -> Row:
    """Time, rate and memory of a row's pass, and its ratio to our kernels without positions."""
    seconds, peak = bench.measure(run)
    name, key = row["name"], (row["length"], row["pass"])
    if name == "fused, none":
        baselines[key] = seconds

    # Tables have no attention; a failed baseline has no ratio.
    tflops = ratio = None
    if not name.startswith("tables"):
        tflops = flops / seconds / 1e12
    if key in baselines:
        ratio = seconds / baselines[key]
    return {
        "ms": seconds * 1e3,
        "tflops": tflops,
        "peak_mib": peak / 2**20,
        "ratio_to_fused_none": ratio,
    }


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
    lengths: tuple[int, ...] = LENGTHS
    if bench.options.quick:
        lengths = QUICK_LENGTHS
    baselines: Baselines = {}
    for flex in (False, True):
        for length in bench.sized(lengths, (32,)):
            measure_length(bench, length, flex, baselines)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
