"""Unpack a released checkpoint, verify it, and print a description.

kerple import-release ARCHIVE [-o DIR] [--json]

ARCHIVE is a zip or tar file (plain, gz, bz2, xz) of a folder with `latest` and global_stepN. An
archive is rejected, and nothing of it remains on disk, if a tar file contains devices or paths or
links outside its folder, and if one of its checkpoints contains anything but tensors and plain
values or weights that are not finite, or the latest one has sizes that differ from its
configuration. Each checkpoint gets a manifest, so that later damage is detected.
"""

import contextlib
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint.directory import find_step, saved_iterations, step_folder, tag_for
from megatron.checkpoint.inspection import check_finite, describe
from megatron.checkpoint.manifest import find_damage, read_manifest, write_manifest_of_folder
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.cli.inspect import readable
from megatron.convert.archive import unpack
from megatron.convert.output import new_folder
from megatron.inference import load_model
from megatron.utils.command_line import docstring_parser
from megatron.utils.errors import UserError


def main(argv: Sequence[str] | None = None) -> None:
    """Raises UserError if the archive is rejected."""
    parser = docstring_parser(__doc__)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="the new folder (default: the archive's name)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)

    # The new folder, by default with the archive's name.
    stem = options.archive.name
    for ending in (".gz", ".bz2", ".xz", ".tar", ".tgz", ".zip"):
        stem = stem.removesuffix(ending)
    output = options.output or Path(stem)

    # Send messages of libraries to standard error: standard output contains only the report.
    with contextlib.redirect_stdout(sys.stderr), new_folder(output) as folder:
        unpack(options.archive, folder)
        roots = sorted(path.parent for path in folder.rglob("latest") if path.is_file())
        if len(roots) != 1:
            listed = ", ".join(str(root.relative_to(folder)) for root in roots) or "none"
            raise CheckpointError(
                f"{options.archive}: must contain exactly one folder with a file `latest`; it "
                f"contains {listed}"
            )
        load = str(output / roots[0].relative_to(folder))
        try:
            report = {"archive": str(options.archive), "load": load, **verify(roots[0])}
        except UserError as error:
            # The folder is about to be removed, so name the file in the archive.
            message = str(error).replace(f"{folder}/", f"{options.archive}: ")
            raise CheckpointError(message) from error
    text = f"{readable(report)}\n  to use it: load={load}"
    if options.json:
        text = json.dumps(report, indent=2)
    print(text)


def verify(root: Path) -> dict[str, Any]:
    """The report on the latest checkpoint. Raises CheckpointError if anything is wrong with one."""
    # All checkpoints, then the model of the latest.
    step = find_step(root)
    for iteration in saved_iterations(root):
        folder = step_folder(root, tag_for(iteration))
        has_manifest = read_manifest(folder) is not None
        for path in folder.glob("[!.]*.pt"):
            load_file(path)
            # torch does not compare the checksums of its files, which are zip files. Those of this
            # project have checksums in the manifest instead.
            if not has_manifest and zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as opened:
                    damaged = opened.testzip()
                if damaged is not None:
                    raise CheckpointError(f"{path}: {damaged} is damaged (wrong checksum)")
        check_finite(folder)
        if not has_manifest:
            write_manifest_of_folder(folder, iteration)
        if damage := find_damage(folder):
            raise CheckpointError(damage)
    model, config = load_model(root)
    positional = 0
    for method in model.positional_methods().values():
        positional += sum(parameter.numel() for parameter in method.parameters())
    return {
        **describe(step, config.model),
        "step": step.name,
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_attention_heads": config.model.num_attention_heads,
        "seq_length": config.model.seq_length,
        "padded_vocab_size": model.settings.padded_vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": positional,
    }
