"""The command line of tools/ckpts/inspect.py."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.description import describe, differences
from megatron.checkpoint.directory import STEP, find_step, iteration_of
from megatron.checkpoint.layers import layer_files, load_layer_file
from megatron.checkpoint.manifest import MANIFEST, find_damage, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config.option_parser import OptionParser
from megatron.model.settings import ModelSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """tools/ckpts/inspect.py: the exit status."""
    parser = OptionParser(prog="inspect.py", description="What a checkpoint is, and whether its files are whole.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="compare with this one")
    parser.add_argument("--iteration", type=int, help="step to look at; default: the one named in `latest`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--accept",
        action="store_true",
        help=f"write a {MANIFEST} of the files as they are, for a checkpoint that has none",
    )
    options = parser.parse_args(arguments)
    if options.accept:
        _accept(_step(options.directory, options.iteration))
    steps = [_step(folder, options.iteration) for folder in (options.directory, options.other) if folder is not None]
    described = [_describe(step) for step in steps]
    report: dict[str, Any] = described[0]
    if options.other is not None:
        report = {"first": described[0], "second": described[1], "differences": differences(*described, *steps)}
    print(json.dumps(report, indent=2) if options.json else _readable(report))
    return 0 if all(one["manifest"] in ("whole", "none") for one in described) else 1


def _step(folder: Path, iteration: int | None) -> Path:
    return folder if STEP.fullmatch(folder.resolve().name) else find_step(folder, iteration)


def _accept(step: Path) -> None:
    """Write a manifest of the files as they are. Raises CheckpointError if there is one, or a file cannot be read."""
    if (step / MANIFEST).exists():
        damage = find_damage(step)
        state = f"it says: {damage}" if damage else "and all files are as it says"
        raise CheckpointError(f"{step}: --accept is for a checkpoint that lost its {MANIFEST}; this has it, {state}")
    for path in sorted(step.glob("*.pt")):
        load_file(path)
    write_manifest_of_folder(step, iteration_of(step))


def _describe(step: Path) -> dict[str, Any]:
    try:
        config = checkpoint_config(step)
    except CheckpointError as error:
        return {**describe(step), "configuration": str(error)}
    rows = sum(load_layer_file(path)["word_embeddings.weight"].shape[0] for path in layer_files(step)[0])
    return describe(step, ModelSettings.from_config(config, rows))


def _readable(report: dict[str, Any]) -> str:
    if "differences" not in report:
        return _summary(report)
    found = report["differences"]
    lines = [_summary(report["first"]), "", _summary(report["second"]), "", "differences"]
    lines += [f"  {name}: {first} | {second}" for name, (first, second) in found["values"].items() if name != "kernels"]
    lines += [
        f"  {name}: {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in found["tensors"].items()
    ]
    return "\n".join(lines if found["values"] or found["tensors"] else [*lines, "  none"])


def _summary(report: dict[str, Any]) -> str:
    training, shape = report["training"] or {}, report["shape"] or {}
    lines = [
        report["step"],
        f"  iteration       {report['iteration']:,}",
        f"  manifest        {report['manifest']}",
        f"  files           {report['files']}, {report['bytes'] / 1e6:,.1f} MB",
        f"  parameters      {report['parameters']:,} ({', '.join(report['dtypes'])})",
        f"  shards          {len(report['layers'])} layers x {report['tensor_parallel']} tensor parallel",
        f"  optimizer       {report['optimizer']}",
    ]
    if training:
        lines.append(f"  samples read    {training['consumed_samples']:,}")
    if shape:
        lines.append(
            "  saved with      " + ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in shape.items())
        )
    if "configuration" in report:
        lines.append(f"  configuration   {report['configuration']}")
    if "pos_emb" in report:
        lines.append(f"  pos-emb         {report['pos_emb']}")
    for where, values in report.get("kernels", {}).items():
        lines.append(f"  kernels, {where}")
        lines.append("    head " + "".join(f"{name:>18}" for name in values))
        for head, row in enumerate(zip(*values.values(), strict=True)):
            cells = (f"{value:>18,}" if isinstance(value, int) else f"{value:>18.4f}" for value in row)
            lines.append(f"    {head:>4} " + "".join(cells))
    return "\n".join(lines)
