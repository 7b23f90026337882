"""Unpack a released checkpoint, verify it, and say what it is.

python tools/ckpts/import_release.py ARCHIVE [-o DIR] [--json]

ARCHIVE is a zip or tar file (plain, gz, bz2, xz) that holds a folder with `latest` and global_stepN. Nothing is kept of
an archive that is refused: names that lead out of its folder, links, files that are no tensors, weights that are not
finite or of other sizes than its configuration says. What is kept gets a manifest, so that later damage is noticed.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    from megatron.config.command_line import OptionParser

    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the new folder (default: the archive's name)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--sample", type=Path, metavar="FILE", help="UTF-8 text for the loss (default: a passage)")
    parser.add_argument("--vocab-file", help="of the tokenizer, where it is not where the checkpoint says")
    parser.add_argument("--merge-file", help="of the tokenizer, where it is not where the checkpoint says")
    parser.add_argument("--max-gigabytes", type=float, default=64.0, help="refuse to unpack more (default: 64)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    from megatron.checkpoint.convert.archive import unpack
    from megatron.checkpoint.convert.folder import new_folder

    options = parse_arguments(arguments)
    output = options.output or Path(_stem(options.archive.name))
    # The libraries' own messages go elsewhere: the report alone is on the standard output.
    with contextlib.redirect_stdout(sys.stderr), new_folder(output) as folder:
        unpack(options.archive, folder, int(options.max_gigabytes * 1024**3))
        root = _find_root(folder, options.archive)
        report = {"archive": str(options.archive), "load": str(output / root.relative_to(folder))}
        report.update(_verify(root, options))
    print(json.dumps(report, indent=2) if options.json else _readable(report))


def _stem(name: str) -> str:
    for ending in (".gz", ".bz2", ".xz", ".tar", ".tgz", ".zip"):
        name = name.removesuffix(ending)
    return name


def _find_root(folder: Path, archive: Path) -> Path:
    """The one folder that holds `latest`. Raises CheckpointError if there is none, or more."""
    from megatron.checkpoint.storage import CheckpointError

    roots = sorted(path.parent for path in folder.rglob("latest") if path.is_file())
    if len(roots) != 1:
        listed = ", ".join(str(root.relative_to(folder)) for root in roots) or "none"
        raise CheckpointError(f"{archive}: must hold one folder with the file `latest`; it holds {listed}")
    return roots[0]


def _verify(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The report on a checkpoint folder. Raises CheckpointError for whatever is wrong with it."""
    from megatron.checkpoint.convert.summary import check_finite, describe
    from megatron.checkpoint.directory import (
        find_step,
        read_manifest,
        saved_iterations,
        step_folder,
        tag_for,
        write_manifest_of_folder,
    )
    from megatron.checkpoint.storage import load_file
    from megatron.inference import load_model

    step = find_step(root)
    rank_files = sorted(step.glob("mp_rank_*_model_states.pt"))
    states = [load_file(path) for path in rank_files]  # refuses anything that is not data
    found = {
        "step": step.name,
        "iteration": states[0].get("iteration") if states else None,
        "optimizer": any(state.get("optimizer") is not None for state in states),
        **check_finite(step),
    }
    for iteration in saved_iterations(root):
        folder = step_folder(root, tag_for(iteration))
        if read_manifest(folder) is None:
            write_manifest_of_folder(folder, iteration)
    model, config = load_model(root)
    return {**found, **describe(model, config), "sample": _sample(model, config, options)}


def _sample(model, config, options: argparse.Namespace) -> dict[str, Any]:
    """The loss of a text, or why there is none."""
    from megatron.checkpoint.convert.summary import SAMPLE, sample_loss
    from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles, check_rows
    from megatron.config import UserError

    files = TokenizerFiles.of(config, options.vocab_file, options.merge_file)
    try:
        tokenizer = files.build()
        check_rows(tokenizer, model.settings.padded_vocab_size)
    except UserError as error:
        if options.vocab_file or options.merge_file or options.sample:
            raise
        return {"left_out": str(error)}
    try:
        text = options.sample.read_text(encoding="utf-8") if options.sample else SAMPLE
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--sample {options.sample}: cannot be read as UTF-8 text ({error})") from error
    tokens = tokenizer.tokenize(text)
    return {"text": str(options.sample or "a passage"), **sample_loss(model, tokens, config.model.seq_length)}


def _readable(report: dict[str, Any]) -> str:
    lines = [
        f"{report['archive']}: {report['step']}, {report['pos_emb']}",
        f"  {report['parameters']:,} parameters ({report['positional_parameters']:,} positional): "
        f"{report['num_layers']} layers of {report['hidden_size']}, {report['num_attention_heads']} heads, "
        f"vocabulary {report['padded_vocab_size']}, trained at length {report['seq_length']}",
        f"  {report['files']} files, {report['bytes'] / 1e6:,.1f} MB, {' and '.join(report['dtypes'])}, "
        f"tensor parallel {report['tensor_parallel']}, optimizer state: {'there' if report['optimizer'] else 'none'}",
        "  all weights are finite, and of the sizes that the configuration says",
    ]
    for where, values in report["kernels"].items():
        lines.append(f"  kernels, per head ({where}):")
        lines += [f"    {name:17}" + " ".join(f"{_number(v):>8}" for v in row) for name, row in values.items()]
    sample = report["sample"]
    if "left_out" in sample:
        lines.append(f"  no loss on a sample: {sample['left_out']}")
    else:
        lines.append(
            f"  loss on {sample['text']}: {sample['loss']:.3f} nats (perplexity {sample['perplexity']:.1f}) over "
            f"{sample['tokens']} tokens at length {sample['length']}; knowing nothing: {sample['uniform_loss']:.3f}"
        )
    return "\n".join([*lines, f"  use it: load={report['load']}"])


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


if __name__ == "__main__":
    # In place of this script's folder, whose inspect.py is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.config.command_line import run_main

    sys.exit(run_main(main))
