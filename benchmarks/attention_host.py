"""CPU time of an attention layer without its kernels: what the host spends on a forward and
backward pass.

    python benchmarks/attention_host.py [--method kerple_log] [--rounds 15] [--json FILE]

The fused backend runs on tiny CPU tensors with all kernel launches removed, so that only its Python
and PyTorch code takes time. "shared tables" is what a training step does in each layer: the tables
are prepared once for all layers. "tables per layer" prepares them in each call. "operator" does
that too and goes through `torch.library`, which only compiled models need; the choice of the
backend is not included. PyTorch's own attention, with its kernel for such tiny tensors, is for
comparison.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.timing import CpuBench, option_parser
from kerple.attention import Attention, position_tables, prepare_tables
from kerple.attention.backends.triton import launch, operator
from kerple.positional import ModelShape, build
from megatron.utils.command_line import run_main

HEADS, LENGTH, SIZE = 4, 16, 16
CALLS = 100  # per measurement


def alternatives(method_name: str) -> dict[str, Callable[[], None]]:
    """Name -> CALLS forward and backward passes."""
    # Tiny states, and the tables of the method.
    sizes = 1, HEADS, LENGTH, SIZE
    query, key, value = (torch.randn(sizes, requires_grad=True) for _ in range(3))
    states = [query, key, value]
    upstream = torch.randn(sizes)
    shape = ModelShape(HEADS, SIZE, HEADS * SIZE, 1, LENGTH)
    method = build(method_name, shape)
    attention = Attention(method, "fused")
    tables = position_tables(method, LENGTH, "cpu", with_jacobians=True)
    shared = prepare_tables(tables, HEADS, LENGTH, "cpu")

    # What a backward pass differentiates by: states, and the coefficients of the tables.
    leaves = list(states)
    for jacobian in (tables.bias_jacobian, tables.weight_jacobian):
        if jacobian is not None:
            leaves.append(jacobian.coefficients)

    def with_operator() -> Tensor:
        kernel = prepare_tables(tables, HEADS, LENGTH, "cpu").kernel
        assert kernel is not None
        scale = SIZE**-0.5
        context, *_ = operator._attention(*states, *kernel, None, [], scale, None)
        return context

    def repeat(forward: Callable[[], Tensor], inputs: list[Tensor]) -> None:
        for _ in range(CALLS):
            torch.autograd.grad(forward(), inputs, upstream, retain_graph=True)

    per_layer = partial(attention, *states, tables=tables)
    with_shared = partial(attention, *states, tables=shared)
    own = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    return {
        "operator": partial(repeat, with_operator, leaves),
        "tables per layer": partial(repeat, per_layer, leaves),
        "shared tables": partial(repeat, with_shared, leaves),
        "PyTorch's own attention": partial(repeat, own, states),
    }


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--method", default="kerple_log", help="a pos-emb with a bias or weight")
    # CPU time, on one thread.
    parser.set_defaults(busy=True)
    bench = CpuBench(parser.parse_args())
    method = bench.options.method
    title = f"{CALLS} forward and backward passes of {method} without kernels, CPU time"
    with patch.object(launch.Launcher, "_launch", lambda *_, **__: None):
        bench.measure(title, alternatives(method))
    return bench.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
