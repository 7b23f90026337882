"""Convert checkpoints: to and from Hugging Face, and to the KERPLE release's layout.

kerple convert to-hf DIR OUT        checkpoint folder -> Hugging Face folder
kerple convert from-hf FOLDER OUT   Pythia, Llama, Mistral, Qwen, an exported model -> checkpoint folder
kerple convert to-release DIR OUT   checkpoint folder -> the release's layout, in any number of shards

DIR contains `latest`, as this project and the release write it. DIR and FOLDER can be hf:ORG/NAME[@REVISION]. OUT must
not exist. It is created only if the converted model computes the same logits (float32, within 1e-4).
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.checkpoint.directory import find_step, find_valid_step, iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config
from megatron.convert import from_hugging_face, to_hugging_face, to_release
from megatron.convert.hub import download, is_hub_name, local_checkpoint
from megatron.convert.output import check_new_folder
from megatron.convert.weights import saved_dtype
from megatron.inference import load_model
from megatron.model.gpt import GPT
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import OptionParser, integer


def main(argv: Sequence[str] | None = None) -> None:
    """Raises UserError if the conversion is not possible."""
    # Each direction is a command.
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(
        name: str, run: Callable[[argparse.Namespace], None], source: str, text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("source", metavar=source, type=Path)
        command.add_argument("output", metavar="OUT", type=Path, help="the new folder")
        command.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)")
        return command

    to_hf = add_command("to-hf", export, "DIR", "checkpoint folder -> Hugging Face folder")
    release = add_command("to-release", export_original, "DIR", "checkpoint folder -> the release's layout")
    from_hf = add_command("from-hf", import_folder, "FOLDER", "Hugging Face folder -> checkpoint folder")

    # Checkpoints to read.
    for command in (to_hf, release):
        command.add_argument(
            "--iteration", type=integer(0), help="checkpoint to convert (default: the one `latest` names)"
        )
        command.add_argument("--fallback", action="store_true", help="if it is damaged, convert the newest valid one")
    release.add_argument(
        "--tensor-parallel", type=integer(1, 1024), default=1, metavar="N", help="number of shards (default: 1)"
    )

    # Hugging Face folders.
    for option in ("--vocab-file", "--merge-file"):
        to_hf.add_argument(option, help="tokenizer file, if it is not where the checkpoint's configuration says")
    to_hf.add_argument(
        "--inference-mode",
        metavar="MODE",
        help="how the exported model attends, such as sinks@4+508; it then has its own code (see evaluate.py "
        "--list-modes; default: full)",
    )
    to_hf.add_argument("--pos-emb-module", help="file or module that registers the model's positional method")
    for command in (to_hf, from_hf):
        command.add_argument("--no-tokenizer", action="store_true", help="convert only the model")

    # Every command writes a new folder.
    options = parser.parse_args(argv)
    check_new_folder(options.output)
    options.run(options)
    print(f"wrote {options.output}")


def load(options: argparse.Namespace, **overrides: str) -> tuple[GPT, Config, torch.dtype, Path]:
    """(model, configuration, dtype to convert to, global_stepN directory)."""
    options.source = local_checkpoint(options.source)
    if options.fallback:
        step = find_valid_step(options.source, options.iteration, fallback=True)
    else:
        step = find_step(options.source, options.iteration)  # load_model verifies it
    model, config = load_model(options.source, iteration_of(step), overrides=overrides)
    saved = saved_dtype(step)
    dtype = DTYPES[options.dtype] if options.dtype else saved
    print(f"{step}: {config.model.pos_emb}, weights {saved}, converting to {dtype}")
    return model, config, dtype, step


def export(options: argparse.Namespace) -> None:
    overrides = {"pos_emb_module": options.pos_emb_module} if options.pos_emb_module else {}
    model, config, dtype, _ = load(options, **overrides)
    tokenizer = None if options.no_tokenizer else TokenizerFiles.of(config, options.vocab_file, options.merge_file)
    to_hugging_face(
        model,
        config,
        options.output,
        tokenizer=tokenizer,
        dtype=dtype,
        inference_mode=options.inference_mode,
    )


def import_folder(options: argparse.Namespace) -> None:
    dtype = DTYPES[options.dtype] if options.dtype else None
    source = download(str(options.source)) if is_hub_name(options.source) else options.source
    from_hugging_face(source, options.output, with_tokenizer=not options.no_tokenizer, dtype=dtype)


def export_original(options: argparse.Namespace) -> None:
    model, config, dtype, step = load(options)
    tensor_parallel, iteration = options.tensor_parallel, iteration_of(step)
    to_release(model, config, options.output, iteration=iteration, tensor_parallel=tensor_parallel, dtype=dtype)
