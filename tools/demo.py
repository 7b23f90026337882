"""`make demo`: train three small models, and evaluate how they extrapolate. Run it again to resume.

python tools/demo.py [SWEEP.yml]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console

import check_megatron  # noqa: F401
from megatron.cli import sweep
from megatron.config.yaml_files import read_file
from megatron.evaluation.records import (
    ExtrapolationRecord,
    extrapolation_records,
    read_results,
)
from megatron.reporting.aggregate import method_of, setting_of
from megatron.reporting.differences import PairedLosses
from megatron.reporting.paper_tables import perplexity_tables
from megatron.reporting.terminal import print_table
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import plan
from megatron.utils.command_line import OptionParser, run_main
from megatron.utils.environment import has_bf16_instructions
from megatron.utils.files import check_writable, write_atomically

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep, in the precision that is fast on this machine unless the sweep sets one, and
    print its results.

    Returns the exit status. Raises UserError.
    """
    parser = OptionParser(
        description="Train small models on short sequences and test them on long ones."
    )
    parser.add_argument(
        "sweep", nargs="?", default=ROOT / "configs" / "sweeps" / "demo.yml", metavar="SWEEP.yml"
    )
    definition = read_sweep(parser.parse_args(argv).sweep)

    # The precision of the sweep, or the fast one.
    fast = "fp32"
    if has_bf16_instructions() and not torch.cuda.is_available():
        fast = "bfloat16"
    overrides = {"precision": fast, **definition.overrides}
    print(f"training in {overrides['precision']}")

    # A copy of the sweep file with this precision.
    check_writable(definition.output, f"{definition.path}: output")
    definition.output.mkdir(parents=True, exist_ok=True)
    keys = {entry.key: entry.value for entry in read_file(definition.path)}
    keys["set"] = overrides
    path = definition.output / "sweep.yml"
    write_atomically(path, json.dumps(keys).encode())
    if status := sweep.main([str(path)]):
        return status

    # Results.
    records = extrapolation_records(read_results(run.results for run in plan(read_sweep(path))))
    for table in perplexity_tables(records, papers=False):
        print_table(Console(), table)
    print("\n".join(conclusions(records)))
    return 0


def conclusions(records: Sequence[ExtrapolationRecord]) -> list[str]:
    """Sentences that the standard errors over documents support: for each method, how its loss
    changes from the shortest to the longest length, and how it compares with the first method at
    the longest length.
    """
    # How the loss of each method changes with the length.
    losses = PairedLosses(records)
    lengths = [record["length"] for record in records]
    shortest, longest = min(lengths), max(lengths)
    methods = {record["pos_emb"]: (setting_of(record), method_of(record)) for record in records}
    reference, *others = methods
    lines = []
    for name, method in methods.items():
        change = losses.difference((*method, longest), (*method, shortest))
        if change is not None:
            verb = "rises"
            if not change.significant:
                verb = "shows no clear change"
            elif change.mean < 0:
                verb = "falls"
            lines.append(
                f"{name}: from {shortest:,} to {longest:,} tokens the loss {verb} ({change} nats "
                "per token)"
            )

    # How the others compare with the first one.
    for name in others:
        difference = losses.difference((*methods[name], longest), (*methods[reference], longest))
        if difference is not None:
            verdict = "a tie"
            if difference.significant and difference.mean < 0:
                verdict = f"{name} is better"
            elif difference.significant:
                verdict = f"{reference} is better"
            lines.append(
                f"{name} minus {reference} at {longest:,}: {difference} nats per token: {verdict} "
                "on this text"
            )
    if others:
        lines.append(
            "± is the standard error over documents. With one seed per method, this does not rank "
            "the methods in general."
        )
    return lines


if __name__ == "__main__":
    sys.exit(run_main(main))
