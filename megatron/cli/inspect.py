"""Show what a checkpoint contains: step, sizes, shards, dtypes, positional parameters, and damage;
or what a dataset contains, after comparing all of it with its manifest.

kerple inspect DIR [--iteration N] [--json]
kerple inspect DIR --accept     write a new manifest for a checkpoint that lost it
kerple inspect PREFIX [--json]  the dataset PREFIX.bin and PREFIX.idx

DIR contains `latest` and global_stepN, as this project or the KERPLE release writes them, or is a
global_stepN itself. Exit status: 0; 1 if a file of a checkpoint does not match the manifest; 2 if a
file cannot be read, or a dataset is not the one that PREFIX.json describes.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.checkpoint.configuration import checkpoint_config, code_notice, files_notice
from megatron.checkpoint.directory import MANIFEST, STEP, find_step, iteration_of
from megatron.checkpoint.inspection import describe
from megatron.checkpoint.manifest import find_damage, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.data.indexed_dataset import (
    bin_path,
    changed_file_error,
    file_sha256,
    idx_path,
    open_indexed_files,
)
from megatron.utils.command_line import docstring_parser, integer, path_option

# What is shown of the manifest of a dataset.
MANIFEST_KEYS = (
    "largest_id",
    "text_bytes",
    "tokenizer",
    "vocab_size",
    "append_eod",
    "inputs",
    "sha256",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. Raises CheckpointError if a file cannot be read."""
    parser = docstring_parser(__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR|PREFIX")
    parser.add_argument(
        "--iteration", type=integer(0), help="iteration to show; default: the one `latest` names"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--pos-emb-module",
        type=path_option,
        metavar="FILE",
        help="file or module that registers your own method",
    )
    parser.add_argument(
        "--accept", action="store_true", help=f"write a {MANIFEST} for a checkpoint that has none"
    )
    options = parser.parse_args(argv)

    # A dataset, a checkpoint, or a folder of checkpoints.
    if idx_path(options.directory).is_file() and not options.directory.is_dir():
        print_dataset(options.directory, options.json)
        return 0
    directory = options.directory.resolve()
    is_step = STEP.fullmatch(directory.name)
    if is_step and options.iteration is not None:
        raise CheckpointError(
            f"{options.directory}: is one checkpoint; remove --iteration, or name its parent folder"
        )
    step = directory if is_step else find_step(options.directory, options.iteration)
    if options.accept:
        accept(step)

    # Without a configuration, only the files are described.
    module = None
    if options.pos_emb_module:
        module = {"pos_emb_module": options.pos_emb_module}
    try:
        config = checkpoint_config(step, module)
    except CheckpointError as error:
        description = {**describe(step), "configuration": str(error)}
    else:
        description = describe(step, config.model)
        for notice in (code_notice(step, config), files_notice(step)):
            if notice:
                print(notice, file=sys.stderr)
    text = json.dumps(description, indent=2) if options.json else readable(description)
    print(text)
    return int(description["manifest"] not in ("whole", "none"))


def accept(step: Path) -> None:
    """Write a manifest of the files on disk. Raises CheckpointError if there is one, if the folder
    is not a checkpoint, or if a file cannot be read.
    """
    if (step / MANIFEST).exists():
        state = "and all files match it"
        damage = find_damage(step)
        if damage:
            state = f"which reports: {damage}"
        raise CheckpointError(
            f"{step}: --accept is for a checkpoint without {MANIFEST}; this one has one, {state}"
        )
    describe(step)  # raises unless it is a checkpoint
    for path in sorted(step.glob("[!.]*.pt")):
        load_file(path)
    write_manifest_of_folder(step, iteration_of(step))


def print_dataset(prefix: Path, as_json: bool) -> None:
    """Print what a dataset contains. Raises UserError if a file is damaged, or not the one that the
    manifest describes; the whole .bin is read.
    """
    # Opening compares parts of the files, this all of them.
    files = open_indexed_files(prefix)
    manifest = files.manifest
    if manifest is not None and manifest.sha256 != file_sha256(bin_path(prefix)):
        raise changed_file_error(bin_path(prefix), prefix)
    description: dict[str, Any] = {
        "dataset": str(prefix),
        "manifest": "none",
        "documents": files.documents,
        "tokens": files.tokens,
        "dtype": files.dtype.name,
    }
    if manifest is not None:
        described = asdict(manifest)
        description["manifest"] = "whole"
        for name in MANIFEST_KEYS:
            description[name] = described[name]
    if as_json:
        print(json.dumps(description, indent=2))
        return
    for name, value in description.items():
        print(f"{name.replace('_', ' '):<15} {value}")


def readable(description: dict[str, Any]) -> str:
    lines = [
        description["step"],
        f"  iteration       {description['iteration']:,}",
        f"  manifest        {description['manifest']}",
        f"  files           {description['files']}, {description['bytes'] / 1e6:,.1f} MB",
        f"  parameters      {description['parameters']:,} ({', '.join(description['dtypes'])})",
        f"  shards          {len(description['layers'])} layers x {description['tensor_parallel']} "
        "tensor parallel",
        f"  optimizer       {description['optimizer']}",
    ]

    # What not every checkpoint has.
    if description["training"]:
        lines.append(f"  samples read    {description['training'].get('consumed_samples', 0):,}")
    if description["shape"]:
        shape = description["shape"].items()
        sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in shape)
        lines.append(f"  saved with      {sizes}")
    if "configuration" in description:
        lines.append(f"  configuration   {description['configuration']}")
    if "pos_emb" in description:
        lines.append(f"  pos-emb         {description['pos_emb']}")
    for place, values in description.get("kernels", {}).items():
        lines.append(f"  kernels, {place}")
        lines.append("    head " + "".join(f"{name:>18}" for name in values))
        for head, row in enumerate(zip(*values.values(), strict=True), start=1):
            lines.append(f"    {head:>4} ")
            for value in row:
                form = ">18," if isinstance(value, int) else ">18.4f"
                lines[-1] += format(value, form)
    return "\n".join(lines)
