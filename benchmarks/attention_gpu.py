"""Attention on a GPU: the fused kernels with every kind of method against plain attention, FlexAttention, the matrix.

DAPE-KERPLE, which mixes heads pair by pair, stands beside them: by chunks that are made again in the backward pass, and
with every score and all that its MLP makes of them in memory.

    python benchmarks/attention_gpu.py [--check] [--seconds 240] [--json FILE] [--dry-run]

12 heads of 64 in bfloat16, batch 32 shrinking with the length, forward and forward + backward (the gradients of the
kernel's parameters included). TFLOP/s count the causal half: 4 b h s^2 d / 2 forward, 3.5 times that with the backward
pass. `--tune` times the fused kernels' tiles instead.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import Bench, close_enough
from benchmarks.materialised import MATERIALISED
from kerple.attention import attend, dispatch, jacobians, score_table, tables
from kerple.attention.backends.triton import launch as fused
from kerple.attention.backends.triton.launch import Tile
from kerple.positional import ModelShape, build

METHODS = ("none", "kerple_log", "kerple_power", "kerple_bias_wht", "alibi", "rpe")
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HEADS, SIZE = 12, 64
DIFFERENTIALS = ("bias_jacobian", "weight_jacobian")
# Beyond this much the matrix is not tried.
MATRIX_BYTES = 60e9
# What DAPE's 12 + 12 inputs, 32 hidden units and 12 outputs take for a pair, in float32 and with their gradients.
DAPE_PAIR_BYTES = 800
# Beyond this length DAPE would take the time of all others.
DAPE_LENGTH = 8192


def states(bench: Bench, batch: int, length: int, heads: int = HEADS, size: int = SIZE, dtype=None):
    """Query, key, value and an upstream gradient `[b, h, s, d]`, laid out in memory as a model makes them; bfloat16
    unless told, but float16 in Triton's interpreter, which takes bfloat16 for whole numbers in matrix products.
    """
    dtype = dtype or (torch.float16 if bench.dry else torch.bfloat16)
    torch.manual_seed(0)
    qkv = torch.randn(4, batch, length, heads, size, device=bench.device, dtype=dtype)
    query, key, value = (part.transpose(1, 2).requires_grad_() for part in qkv[:3].clone())
    return query, key, value, qkv[3].transpose(1, 2)


def method_of(bench: Bench, name: str, length: int, heads: int = HEADS, size: int = SIZE):
    torch.manual_seed(0)
    return build(name, ModelShape(heads, size, heads * size, 1, length)).to(bench.device)


def through(backend: str, method, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    bias, weight = tables(method, key.shape[2], query.device)
    changes = dict.fromkeys(DIFFERENTIALS)
    if backend == "fused" and torch.is_grad_enabled():
        changes = dict(zip(DIFFERENTIALS, jacobians(method, key.shape[2], query.device), strict=True))
    return attend(query, key, value, bias_table=bias, weight_table=weight, backend=backend, **changes)


def alternatives(bench: Bench, batch: int, length: int, query, key, value) -> dict[str, tuple[Callable, list]]:
    """Name -> forward pass, and the leaves of its backward pass. The baseline comes first."""
    made: dict[str, tuple[Callable, list]] = {}

    def add(name: str, backend, method_name: str) -> None:
        method = method_of(bench, method_name, length)
        leaves = [query, key, value, *method.parameters()]
        made[name] = (lambda: through(backend, method, query, key, value), leaves)

    for method in METHODS:
        add(f"fused, {method}", "fused", method)
    for name, backend in SDPA.items():

        def plain(backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        if not bench.dry:
            made[f"sdpa {name}, no positions"] = (plain, [query, key, value])
    if not bench.dry:
        add("flex, no positions", "flex", "none")
        add("flex, kerple_log", "flex", "kerple_log")
        add("flex, kerple_bias_wht", "flex", "kerple_bias_wht")
    if batch * HEADS * length**2 * 14 < MATRIX_BYTES:
        add("materialised, kerple_log", "materialised", "kerple_log")
        add("materialised, kerple_bias_wht", "materialised", "kerple_bias_wht")

    def add_dape(name: str, backend: str) -> None:
        method = method_of(bench, "dape_kerple", length)

        def forward() -> Tensor:
            table = score_table(method, length, query.device)
            return attend(query, key, value, modify_scores=method.modify_scores, table=table, backend=backend)

        made[name] = (forward, [query, key, value, *method.parameters()])

    if length <= DAPE_LENGTH:
        add_dape("chunked, dape_kerple", "chunked")
    if batch * length**2 * DAPE_PAIR_BYTES < MATRIX_BYTES:
        add_dape("materialised, dape_kerple", "reference")
    return made


def parameter_errors(bench: Bench, name: str, query, key, value, upstream, window, tolerance: float) -> list:
    """Of the gradients of a method's parameters, as training has them: by the tables' jacobians."""
    t, size = key.shape[2:]
    max_kv_len = t if window is None else window
    runs = []
    for backend, kind in (("fused", query.dtype), ("reference", torch.float64)):
        method = method_of(bench, name, t, key.shape[1], size)
        if not any(parameter.requires_grad for parameter in method.parameters()):
            return []
        changes = dict(zip(DIFFERENTIALS, jacobians(method, max_kv_len, query.device), strict=True))
        found = tables(method, max_kv_len, query.device)
        if kind == torch.float64:
            found, changes = [None if table is None else table.double() for table in found], {}
        states = [part.detach().to(kind) for part in (query, key, value)]
        result = attend(*states, bias_table=found[0], weight_table=found[1], window=window, backend=backend, **changes)
        runs.append(torch.autograd.grad(result, list(method.parameters()), upstream.to(kind)))
    return [close_enough(found, exact, tolerance) for found, exact in zip(*runs, strict=True)]


def check(bench: Bench) -> bool:
    """The fused kernels against the materialised reference in float64: values and all gradients."""
    passed = True
    dtypes = [torch.float16] if bench.dry else [torch.bfloat16, torch.float16, torch.float32]
    sizes = [(64, 40, 70, None)] if bench.dry else [
        (64, 512, 512, None), (64, 700, 1001, None), (64, 700, 1001, 300), (128, 300, 300, None), (32, 1, 77, None),
        (80, 129, 257, 100), (64, 1, 1, None), (96, 2048, 2048, None),
    ]  # fmt: skip
    for dtype in dtypes:
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
        for size, s, t, window in sizes:
            for name in ("none", "kerple_log", "kerple_power__ap", "kerple_bias_wht", "rpe"):
                query, key, value, upstream = states(bench, 2, t, 3, size, dtype)
                query, upstream = (part[:, :, t - s :].detach() for part in (query, upstream))
                found_tables = tables(method_of(bench, name, t, 3, size), t if window is None else window, bench.device)
                runs = []
                for backend, kind in (("fused", dtype), ("reference", torch.float64)):
                    leaves = [part.detach().to(kind).requires_grad_() for part in (query, key, value)]
                    bias, weight = (
                        None if table is None else table.detach().to(
                            torch.promote_types(kind, torch.float32)
                        ).requires_grad_()
                        for table in found_tables
                    )  # fmt: skip
                    result = attend(*leaves, bias_table=bias, weight_table=weight, window=window, backend=backend)
                    leaves += [table for table in (bias, weight) if table is not None]
                    runs.append([result, *torch.autograd.grad(result, leaves, upstream.to(kind))])
                errors = [close_enough(found, exact, tolerance) for found, exact in zip(*runs, strict=True)]
                errors += parameter_errors(bench, name, query, key, value, upstream, window, tolerance)
                # With one key the softmax is constant: gradients are zero but for rounding.
                good = all(ok for ok, _ in (errors if t > 1 else errors[:1]))
                passed &= good
                row = {"check": name, "dtype": str(dtype), "size": size, "s": s, "t": t, "window": window}
                bench.attempt(row, lambda good=good, errors=errors: {"ok": good, "errors": [e for _, e in errors]})
    repeated = [
        torch.autograd.grad(through("fused", method, *parts[:3]), [*parts[:3], *method.parameters()], parts[3])
        for method, parts in [(method_of(bench, "kerple_bias_wht", 70), states(bench, 2, 70))] * 2
        if not bench.dry
    ]
    same = not repeated or all(torch.equal(a, b) for a, b in zip(*repeated, strict=True))
    return bench.checked(passed and same, second_run_bit_equal=same)


def tune(bench: Bench) -> None:
    """Forward and forward + backward for each tile in turn, the others as they are."""
    candidates = {
        "forward": [Tile(128, 64, 4, 2), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)],
        "key_value": [Tile(64, 128, 8, 1), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 128, 4, 2)],
        "query": [Tile(64, 64, 4, 2), Tile(128, 64, 4, 2), Tile(128, 64, 8, 3), Tile(128, 32, 4, 2)],
        "tables": [Tile(128, 128, 8, 2), Tile(128, 128, 16, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 3)],
    }
    length = 128 if bench.dry else 4096
    original = fused.tiles_for
    for name in ("kerple_log", "kerple_bias_wht"):
        query, key, value, upstream = states(bench, 1 if bench.dry else 8, length)
        method = method_of(bench, name, length)
        leaves = [query, key, value, *method.parameters()]

        def forward(method=method, parts=(query, key, value)):
            return through("fused", method, *parts)

        def both(forward=forward, leaves=leaves, upstream=upstream):
            return torch.autograd.grad(forward(), leaves, upstream)

        for slot, tiles in {"as it is": [None], **candidates}.items():
            for tile in tiles[: 1 if bench.dry else None]:

                def changed(*args, slot=slot, tile=tile, **options):
                    usual = original(*args, **options)
                    return usual if tile is None else type(usual)(**{**vars(usual), slot: tile})

                fused.tiles_for = changed
                row = {"tune": name, "slot": slot, "tile": str(tile)}
                bench.attempt(
                    row,
                    lambda forward=forward, both=both: {
                        "forward_ms": bench.measure(torch.no_grad()(forward))[0] * 1e3,
                        "both_ms": bench.measure(both)[0] * 1e3,
                    },
                )
    fused.tiles_for = original


def main() -> int:
    bench = Bench(__doc__, "attention_gpu.json")
    dispatch.BACKENDS[MATERIALISED.name] = MATERIALISED
    if bench.options.check and not check(bench):
        return 1
    if bench.options.tune:
        tune(bench)
        return 0
    lengths = (64,) if bench.dry else (2048, 8192, 512, 65_536, 16_384, 1024, 4096, 32_768)
    for length in lengths:
        batch = 1 if bench.dry else min(32, max(1, 65_536 // length))
        query, key, value, upstream = states(bench, batch, length)
        flops = 4 * batch * HEADS * length**2 * SIZE / 2
        base: dict[str, float] = {}
        for name, (forward, leaves) in alternatives(bench, batch, length, query, key, value).items():

            def both(forward=forward, leaves=leaves, upstream=upstream) -> None:
                torch.autograd.grad(forward(), leaves, upstream)

            for kind, run, factor in (("forward", torch.no_grad()(forward), 1.0), ("forward+backward", both, 3.5)):
                row = {"length": length, "batch": batch, "pass": kind, "name": name}

                def measured(run=run, kind=kind, factor=factor, name=name, base=base, flops=flops) -> dict[str, object]:
                    seconds, peak = bench.measure(run)
                    if name == "fused, none":
                        base[kind] = seconds
                    return {
                        "ms": seconds * 1e3,
                        "tflops": factor * flops / seconds / 1e12,
                        "peak_mib": peak / 2**20,
                        "ratio_to_fused_none": seconds / base[kind] if kind in base else None,
                    }

                bench.attempt(row, measured)
        del query, key, value, upstream
    return 0


if __name__ == "__main__":
    sys.exit(main())
