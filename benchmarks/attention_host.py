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

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when it is imported

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.timing import add_options, apply_options, compare, show, write_json
from kerple.attention import Attention, position_tables, prepare_tables
from kerple.attention.backends.triton import launch, operator
from kerple.positional import ModelShape, build
from megatron.utils.command_line import run_main

HEADS, LENGTH, SIZE = 4, 16, 16
CALLS = 100  # per measurement


def alternatives(method_name: str) -> dict[str, Callable[[], object]]:
    """Name -> CALLS forward and backward passes."""
    # The tables of the method, and what a backward pass differentiates by.
    method = build(method_name, ModelShape(HEADS, SIZE, HEADS * SIZE, 1, LENGTH))
    attention = Attention(method, "fused")
    query, key, value = (torch.randn(1, HEADS, LENGTH, SIZE, requires_grad=True) for _ in range(3))
    upstream = torch.randn(1, HEADS, LENGTH, SIZE)
    tables = position_tables(method, LENGTH, "cpu", with_jacobians=True)
    shared = prepare_tables(tables, HEADS, LENGTH, "cpu")
    leaves = [query, key, value]
    for jacobian in (tables.bias_jacobian, tables.weight_jacobian):
        if jacobian is not None:
            leaves.append(jacobian.coefficients)

    def repeat(run: Callable[[], Tensor], inputs: list[Tensor]) -> None:
        for _ in range(CALLS):
            torch.autograd.grad(run(), inputs, upstream, retain_graph=True)

    def with_operator() -> Tensor:
        kernel = prepare_tables(tables, HEADS, LENGTH, "cpu").kernel
        assert kernel is not None
        context: Tensor = operator._attention(
            query, key, value, *kernel, None, [], SIZE**-0.5, None
        )[0]
        return context

    return {
        "operator": lambda: repeat(with_operator, leaves),
        "tables per layer": lambda: repeat(
            lambda: attention(query, key, value, tables=tables), leaves
        ),
        "shared tables": lambda: repeat(
            lambda: attention(query, key, value, tables=shared), leaves
        ),
        "PyTorch's own attention": lambda: repeat(
            lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True), leaves[:3]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--method", default="kerple_log", help="a pos-emb with a bias or weight")
    add_options(parser)
    options = parser.parse_args()
    apply_options(options)
    torch.set_num_threads(1)
    title = f"{CALLS} forward and backward passes of {options.method} without kernels, CPU time"
    with patch.object(launch.Launcher, "_launch", lambda *_, **__: None):
        timings = compare(
            alternatives(options.method), rounds=options.rounds, clock=time.process_time
        )
    show(title, timings)
    if options.json:
        write_json(options.json, {title: timings})


if __name__ == "__main__":
    sys.exit(run_main(main))
