"""Unpack a released checkpoint, verify it, and print a description.

kerple import-release ARCHIVE [-o DIR] [--json]

ARCHIVE is a zip or tar file (plain, gz, bz2, xz) of a folder with `latest` and global_stepN. An archive is
rejected, and nothing of it remains on disk, if it contains paths outside its folder, links, files with anything but
tensors and plain values, weights that are not finite, or sizes that differ from its configuration. An accepted
checkpoint gets a manifest, so that later damage is detected.
"""

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.checkpoint.directory import (
    find_damage,
    find_step,
    read_manifest,
    read_state_file,
    saved_iterations,
    step_folder,
    tag_for,
    write_manifest_of_folder,
)
from megatron.checkpoint.inspection import check_finite, describe, head_values
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.config import Config
from megatron.convert.archive import unpack
from megatron.convert.output import new_folder
from megatron.convert.tokenizer_files import check_rows
from megatron.inference import load_model
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import OptionParser, number
from megatron.utils.errors import UserError
from megatron.utils.files import read_file

SAMPLE_LIMIT = 1 << 24

SAMPLE = '''The river rises in the hills to the north of the town, and for most of the year it is no more than a stream
that children cross on stones. In spring, when the snow melts, it fills the whole of its valley within a day.
People who have lived there for a long time know the signs: the water turns brown, the birds leave the lower
meadows, and the old bridge begins to hum. Then the shops along the bank are closed, the cars are taken up to
the church, and everybody waits.

def largest(numbers):
    """Return the largest of the numbers, or None if there are none."""
    best = None
    for number in numbers:
        if best is None or number > best:
            best = number
    return best
'''


def main(argv: Sequence[str] | None = None) -> None:
    """Raises UserError if the archive is rejected."""
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, metavar="ARCHIVE")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="the new folder (default: the archive's name)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--sample", type=Path, metavar="FILE", help="UTF-8 text for the loss (default: a built-in text)"
    )
    for option in ("--vocab-file", "--merge-file"):
        parser.add_argument(option, help="tokenizer file, if it is not where the checkpoint's configuration says")
    parser.add_argument(
        "--max-gigabytes",
        type=number(0, above=True),
        default=64.0,
        help="maximum size of the unpacked archive (default: 64)",
    )
    options = parser.parse_args(argv)

    # The new folder, by default with the archive's name.
    stem = options.archive.name
    for ending in (".gz", ".bz2", ".xz", ".tar", ".tgz", ".zip"):
        stem = stem.removesuffix(ending)
    output = options.output or Path(stem)

    # Send messages of libraries to standard error: standard output contains only the report.
    with contextlib.redirect_stdout(sys.stderr), new_folder(output) as folder:
        unpack(options.archive, folder, int(options.max_gigabytes * 1024**3))
        roots = sorted(path.parent for path in folder.rglob("latest") if path.is_file())
        if len(roots) != 1:
            listed = ", ".join(str(root.relative_to(folder)) for root in roots) or "none"
            raise CheckpointError(
                f"{options.archive}: must contain exactly one folder with a file `latest`; it contains {listed}"
            )
        load = str(output / roots[0].relative_to(folder))
        try:
            report = {"archive": str(options.archive), "load": load, **verify(roots[0], options)}
        except UserError as error:  # the folder is about to be removed, so name the file in the archive
            raise CheckpointError(str(error).replace(f"{folder}/", f"{options.archive}: ")) from error
    print(json.dumps(report, indent=2) if options.json else readable(report))


def verify(root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The report on a checkpoint folder. Raises CheckpointError if anything is wrong with it."""
    step = find_step(root)
    for path in step.glob("[!.]*.pt"):
        load_file(path)
    state = read_state_file(step)
    check_finite(step)
    description = describe(step)
    for iteration in saved_iterations(root):
        folder = step_folder(root, tag_for(iteration))
        if read_manifest(folder) is None:
            write_manifest_of_folder(folder, iteration)
    if damage := find_damage(step):
        raise CheckpointError(damage)
    model, config = load_model(root)
    methods = model.positional_methods().values()
    return {
        "step": step.name,
        "iteration": state.get("iteration"),
        "optimizer": state.get("optimizer") is not None,
        **{name: description[name] for name in ("tensor_parallel", "dtypes", "files", "bytes")},
        "pos_emb": config.model.pos_emb,
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_attention_heads": config.model.num_attention_heads,
        "seq_length": config.model.seq_length,
        "padded_vocab_size": model.settings.padded_vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positional_parameters": sum(parameter.numel() for method in methods for parameter in method.parameters()),
        "kernels": head_values(step, model.settings.config),
        "sample": sample_loss(model, config, options),
    }


@torch.no_grad()
def sample_loss(model: GPT, config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Mean cross entropy in nats of a text, in segments of the training length, next to ln(vocabulary), the loss of a
    uniform prediction; or why it was not computed. Raises CheckpointError if the loss is not finite.
    """
    # Without a tokenizer there is no loss, unless the user has asked for it.
    files = TokenizerFiles.of(config, options.vocab_file, options.merge_file)
    try:
        tokenizer = files.build()
        check_rows(tokenizer, model.settings.padded_vocab_size)
    except UserError as error:
        if options.vocab_file or options.merge_file or options.sample:
            raise
        return {"left_out": str(error)}
    try:
        text = read_file(options.sample, SAMPLE_LIMIT).decode() if options.sample else SAMPLE
    except UnicodeDecodeError as error:
        raise UserError(f"--sample {options.sample}: cannot be read as UTF-8 text ({error})") from error
    tokens, length = torch.tensor(tokenizer.tokenize(text), dtype=torch.long), config.model.seq_length
    if len(tokens) < 2:
        raise CheckpointError("--sample: the text is too short; it needs at least two tokens")

    # Segments of the training length, because longer ones would measure extrapolation.
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        segment = tokens[start : start + length + 1]
        logits = model(segment[None, :-1])[0].float()
        total += float(F.cross_entropy(logits, segment[1:], reduction="sum"))
    loss = total / (len(tokens) - 1)
    if not math.isfinite(loss):
        raise CheckpointError("the model's loss on the sample is not finite; its weights are damaged")
    return {
        "text": str(options.sample or "a passage"),
        "tokens": len(tokens) - 1,
        "length": length,
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "uniform_loss": math.log(model.settings.padded_vocab_size),
    }


def readable(report: dict[str, Any]) -> str:
    lines = [
        f"{report['archive']}: {report['step']}, {report['pos_emb']}",
        f"  {report['parameters']:,} parameters ({report['positional_parameters']:,} positional): "
        f"{report['num_layers']} layers, hidden size {report['hidden_size']}, {report['num_attention_heads']} heads, "
        f"vocabulary {report['padded_vocab_size']}, training length {report['seq_length']}",
        f"  {report['files']} files, {report['bytes'] / 1e6:,.1f} MB, {' and '.join(report['dtypes'])}, "
        f"tensor parallel {report['tensor_parallel']}, optimizer state: {'yes' if report['optimizer'] else 'none'}",
        "  all weights are finite, and have the sizes in the configuration",
    ]
    for place, values in report["kernels"].items():
        lines.append(f"  kernels, per head ({place}):")
        for name, row in values.items():
            cells = []
            for value in row:
                cells.append(f"{value:>8}" if isinstance(value, int) else f"{value:>8.4f}")
            lines.append(f"    {name:17}" + " ".join(cells))
    sample = report["sample"]
    if "left_out" in sample:
        lines.append(f"  no loss on a sample text: {sample['left_out']}")
    else:
        lines.append(
            f"  loss on {sample['text']}: {sample['loss']:.3f} nats (perplexity {sample['perplexity']:.1f}) over "
            f"{sample['tokens']} tokens at length {sample['length']}; uniform prediction: {sample['uniform_loss']:.3f}"
        )
    return "\n".join([*lines, f"  to use it: load={report['load']}"])
