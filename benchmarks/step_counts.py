"""Counts what a training step of both recipes does on a GPU, and the MFU that this allows. No GPU
is needed.

    python benchmarks/step_counts.py [--method kerple_log] [--recipe small_bf16.yml 1-3B.yml]
    [--json FILE]

Runs three steps through `Engine` and DeepSpeed on a simulated CUDA device (needs g++) and counts
the third one: kernel launches, host synchronizations, blocking copies, FLOPs, memory traffic and
memory. Nothing is measured.

Traffic: each kernel reads its inputs from memory once and writes its outputs once (see
`tests/support/simulated_cuda/traffic.py`). The row "attention" includes the attention kernels'
traffic, and the FLOPs include their products. Tiles on the diagonal count in full, because the
kernels compute all of their pairs.

MFU bound: kernels run one after the other, and each takes as long as its FLOPs at the peak rate or
its traffic at the peak bandwidth, whichever is longer. Launch latency, the host and communication
take no time. A kernel that finds its inputs in the second-level cache can be faster than that. The
MFU's numerator is that of the log: 6 per parameter outside the input embedding, plus causal
attention, without recomputation.
"""

import argparse
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.results import write_json
from megatron.model import attention, fused_block, gpt, layers
from megatron.training.flops import PEAK_FLOPS, count_parameters, flops_per_token
from megatron.utils.command_line import run_main
from tests.support.simulated_cuda import SimulatedCuda, environment, is_active
from tests.support.simulated_cuda.traffic import Cost

# The recipes, and what is overridden to run them on one simulated GPU.
RECIPES = {"small_bf16.yml": [], "1-3B.yml": ["model-parallel-size=1"]}
# Memory bandwidth in bytes/s, from NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200 SXM, HGX
# B200, GeForce RTX 4090.
BANDWIDTHS = {
    "A100": 2.039e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
    "B200": 8e12,
    "RTX 4090": 1.008e12,
}
# Fractions of peak FLOPs and of peak bandwidth for the bounds: those of the data sheet; what the
# largest products and copies reach on an H100 (798 TFLOP/s, 3.0 TB/s); the assumption of
# docs/results/full-scale.md; and what the shapes of the 162M recipe may reach on an H100 (600
# TFLOP/s, 2.7 TB/s).
EFFICIENCIES = (
    (1.0, 1.0),
    (0.81, 0.9),
    (0.7, 0.85),
    (0.61, 0.81),
)
# Which part of the step a method computes, with the gradients of what it returns. Inner calls take
# precedence.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (gpt.Embedding, "forward", "embedding"),
    (attention.SelfAttention, "forward", "attention"),
    (attention.SelfAttention, "position_tables", "attention"),
    (layers.MLP, "forward", "MLP"),
    (layers.GatedMLP, "forward", "MLP"),
    (nn.LayerNorm, "forward", "norms"),
    (nn.RMSNorm, "forward", "norms"),
    (layers.HeadNorm, "forward", "norms"),
    (gpt.TransformerBlock, "forward", "residuals"),
    (attention.SelfAttention, "context", "attention"),
    (fused_block._RowLinear, "apply", "attention"),
    (fused_block._ActivationLinear, "apply", "MLP"),
    (fused_block._GatedLinear, "apply", "MLP"),
    (fused_block._NormLinear, "apply", "norms"),
    (gpt, "run_blocks", "residuals"),
    (gpt.FinalNorm, "forward", "loss"),
    (gpt.Output, "loss", "loss"),
)
FORWARD_BACKWARD = ("embedding", "attention", "norms", "MLP", "residuals", "loss", "other")


Counts = dict[str, Any]


class Launch(NamedTuple):
    """An operator or Triton kernel: its name, the part of the step it belongs to, and its cost."""

    name: str
    part: str
    cost: Cost


class StepCounter(SimulatedCuda):
    """A simulated device that also records launches by part of the step.

    Attributes:
        launches: all of them, in order.
        saved: bytes that the forward pass keeps for the backward pass.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.launches: list[Launch] = []
        self.saved = 0

    def record(self, name: str, launches: int, cost: Callable[[], Cost]) -> None:
        super().record(name, launches, cost)
        self.launches.append(Launch(name, self._part(), cost()))

    def _part(self) -> str:
        if self._parts:
            return self._parts[-1]
        node: Any = torch._C._current_autograd_node()  # torch declares `metadata` as a method
        if node is None or type(node).__name__ == "AccumulateGrad":
            return "optimizer"
        return node.metadata.get("part", "other")

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield from super()._replacements()
        for owner, name, part in PARTS:
            yield owner, name, self._labelled(getattr(owner, name), part)
        yield gpt.GPT, "loss", self._with_saved_bytes(gpt.GPT.loss)

    def _labelled(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self._parts.append(part)
            try:
                result = function(*arguments, **options)
            finally:
                self._parts.pop()

            # The nodes between the result and those that already have a part.
            nodes: list[Any] = []
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    nodes.append(leaf.grad_fn)
            while nodes:
                node = nodes.pop()
                if node is not None and "part" not in node.metadata:
                    node.metadata["part"] = part
                    nodes += [before for before, _ in node.next_functions]
            return result

        return call

    def _with_saved_bytes(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(loss)
        def call(*arguments: Any, **options: Any) -> Tensor:
            before = self.allocated
            result = loss(*arguments, **options)
            self.saved += self.allocated - before
            return result

        return call


def count_step(files: list[str], *overrides: str) -> Counts:
    """The counts of a training step, see `main`. Requires `process_group()`."""
    # The simulated GPU is part of the tests.
    from tests.support.simulated_cuda.training import SimulatedTraining

    # The third step has all optimizer states, and nothing of the first step is left.
    with StepCounter() as device:
        training = SimulatedTraining(device, files, *overrides)
        training.third_step()
        engine = training.engine
        parameters = count_parameters(engine.layers(), engine.settings)
        length = engine.seq_length
        of_token = flops_per_token(parameters["outside_embedding"], engine.config.model, length)
        model_flops = engine.global_batch * length * of_token

    # Matrix products count as arithmetic, not traffic.
    launches = device.launches
    kernels, traffic = Counter[str](), Counter[str]()
    for name, part, cost in launches:
        kernels[part] += cost.launches
        if not cost.flops or name.startswith("triton."):
            traffic[part] += cost.bytes

    # All counts, as `--json` writes them.
    return {
        "parameters": parameters["total"],
        "kernels": with_totals(kernels),
        "synchronizations": device.synchronizations,
        "blocking copies": device.blocking_copies,
        "bytes outside matmuls": with_totals(traffic),
        "flops": sum(launch.cost.flops for launch in launches),
        "model flops": model_flops,
        "bytes saved for backward": device.saved,
        "peak bytes": device.peak,
        "MFU bound": mfu_bounds(launches, model_flops),
        "details": by_kernel(launches),
    }


def mfu_bounds(launches: list[Launch], model_flops: float) -> dict[str, list[float]]:
    """GPU -> the MFU at each of EFFICIENCIES, if every kernel took as long as its arithmetic or its
    traffic.
    """
    bounds: dict[str, list[float]] = {}
    for name, bandwidth in BANDWIDTHS.items():
        peak = PEAK_FLOPS[name]
        bounds[name] = []
        for flops, memory in EFFICIENCIES:
            seconds = step_seconds(launches, peak * flops, bandwidth * memory)
            bounds[name].append(model_flops / peak / seconds)
    return bounds


def by_kernel(launches: list[Launch]) -> list[Counts]:
    """The sums by part of the step and kernel. Kernels with the most traffic come first."""
    details: dict[tuple[str, str], Counts] = {}
    for name, part, cost in launches:
        empty = {"part": part, "name": name, "launches": 0, "bytes": 0, "flops": 0}
        totals = details.setdefault((part, name), empty)
        totals["launches"] += cost.launches
        totals["bytes"] += cost.bytes
        totals["flops"] += cost.flops
    return sorted(details.values(), key=lambda totals: -totals["bytes"])


def with_totals(values: Counter[str]) -> dict[str, int]:
    """The values by part of the step, and their sums without and with the optimizer."""
    parts = {part: values[part] for part in FORWARD_BACKWARD}
    return {
        **parts,
        "forward and backward": sum(parts.values()),
        "optimizer": values["optimizer"],
        "total": values.total(),
    }


def step_seconds(launches: list[Launch], flops: float, bandwidth: float) -> float:
    """Seconds of a step at these rates in FLOP/s and bytes/s, one kernel after the other."""
    seconds = 0.0
    for _, _, cost in launches:
        seconds += max(cost.flops / flops, cost.bytes / bandwidth)
    return seconds


def rows(counts: Counts) -> Iterator[tuple[str, str]]:
    """The rows of a recipe's column."""
    yield "parameters", f"{counts['parameters'] / 1e6:,.0f}M"
    for name in ("forward and backward", "optimizer", "total"):
        yield f"kernel launches, {name}", f"{counts['kernels'][name]:,}"
    yield "host synchronizations", str(len(counts["synchronizations"]))
    yield "blocking copies", str(len(counts["blocking copies"]))
    for name, value in counts["bytes outside matmuls"].items():
        yield f"GB outside matmuls, {name}", f"{value / 1e9:.1f}"
    yield "TFLOPs executed", f"{counts['flops'] / 1e12:.2f}"
    yield "TFLOPs of the model (MFU)", f"{counts['model flops'] / 1e12:.2f}"
    yield "GiB saved for backward", f"{counts['bytes saved for backward'] / 2**30:.2f}"
    yield "GiB peak", f"{counts['peak bytes'] / 2**30:.2f}"
    for name, bounds in counts["MFU bound"].items():
        yield f"MFU bound, {name}", " / ".join(f"{bound:.0%}" for bound in bounds)


def layer_row(recipe: str, method: str, overrides: list[str]) -> tuple[str, str]:
    """The kernel launches and traffic that a third layer adds."""
    files, part = [recipe, f"pos_emb/{method}.yml"], "forward and backward"
    two = count_step(files, *overrides, "num-layers=2")
    three = count_step(files, *overrides, "num-layers=3")
    kernels = three["kernels"][part] - two["kernels"][part]
    traffic = three["bytes outside matmuls"][part] - two["bytes outside matmuls"][part]
    return f"{kernels:,}", f"{traffic / 1e9:.1f}"


def layer_table(recipe: str, methods: list[str], overrides: list[str]) -> Table:
    """The difference between three layers and two, a row per method."""
    title = (
        f"{recipe}, torch {torch.__version__}: per layer, forward and backward pass; counted, not "
        "measured"
    )
    headers = ("", "kernel launches", "GB outside matmuls")
    table = Table(*headers, title=title, title_justify="left")
    for method in methods:
        table.add_row(method, *layer_row(recipe, method, overrides))
    return table


def recipe_table(method: str, results: dict[str, Counts]) -> Table:
    """The counts of a method, a column per recipe."""
    title = f"{method}, torch {torch.__version__}: counted, not measured"
    table = Table("", *results, title=title, title_justify="left")
    columns = [dict(rows(counts)) for counts in results.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def kernel_table(recipe: str, details: list[Counts]) -> Table:
    """Launches and traffic, a row per kernel."""
    headers = ("part", "kernel", "launches", "GB", "TFLOPs")
    table = Table(*headers, title=recipe, title_justify="left")
    for row in details:
        launches = f"{row['launches']:,}"
        traffic = f"{row['bytes'] / 1e9:.2f}"
        flops = f"{row['flops'] / 1e12:.2f}"
        table.add_row(row["part"], row["name"], launches, traffic, flops)
    return table


def main() -> None:
    # Options.
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--method", default="kerple_log", help="positional method (default: kerple_log)"
    )
    parser.add_argument(
        "--recipe",
        nargs="+",
        default=list(RECIPES),
        help=f"files in configs/ (default: {' '.join(RECIPES)})",
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the configuration"
    )
    parser.add_argument(
        "--names", action="store_true", help="also print launches and traffic by kernel"
    )
    parser.add_argument(
        "--per-layer",
        nargs="+",
        default=[],
        metavar="METHOD",
        help="count what a layer adds, for each of these methods",
    )
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    options = parser.parse_args()

    # The simulated GPU needs a preloaded library, so start the program again with it.
    if not is_active():
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, environment())
    from tests.support.simulated_cuda.training import process_group

    # Output to a file is not wrapped.
    width = None
    if not sys.stdout.isatty():
        width = 140
    console = Console(width=width)
    if options.per_layer:
        recipe = options.recipe[0]
        overrides = RECIPES.get(recipe, []) + options.set
        with process_group():
            table = layer_table(recipe, options.per_layer, overrides)
        console.print(table)
        return

    # Otherwise a column per recipe.
    results = {}
    with process_group():
        for recipe in options.recipe:
            files = [recipe, f"pos_emb/{options.method}.yml"]
            overrides = RECIPES.get(recipe, []) + options.set
            results[recipe] = count_step(files, *overrides)
    console.print(recipe_table(options.method, results))
    if options.names:
        for recipe, counts in results.items():
            console.print(kernel_table(recipe, counts["details"]))
    if options.json:
        write_json(options.json, results)


if __name__ == "__main__":
    sys.exit(run_main(main))
