"""Convert checkpoints to and from Hugging Face.

kerple convert to-hf DIR OUT        checkpoint folder -> Hugging Face folder
kerple convert from-hf FOLDER OUT   Pythia, Llama, Mistral, Qwen, an exported model -> checkpoint
folder

DIR contains `latest`, as this project and the release write it. DIR and FOLDER can be
hf:ORG/NAME[@REVISION]. OUT must not exist. It is created only if the converted model computes the
same logits (float32, within 1e-4).
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.checkpoint.directory import find_step, iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.checkpoint.manifest import find_valid_step
from megatron.convert import from_hugging_face, to_hugging_face
from megatron.convert.hub import PREFIX, download, local_checkpoint
from megatron.convert.output import check_new_folder
from megatron.convert.weights import saved_dtype
from megatron.inference import load_model
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import docstring_parser, integer, path_option


def main(argv: Sequence[str] | None = None) -> None:
    """Raises UserError if the conversion is not possible."""
    # Each direction is a command.
    parser = docstring_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(
        name: str, run: Callable[[argparse.Namespace], None], source: str, text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("source", metavar=source, type=Path)
        command.add_argument("output", metavar="OUT", type=Path, help="the new folder")
        command.add_argument(
            "--dtype", choices=DTYPES, help="dtype of the weights (default: unchanged)"
        )
        command.add_argument("--no-tokenizer", action="store_true", help="convert only the model")
        command.add_argument(
            "--pos-emb-module",
            type=path_option,
            help="file or module that registers the model's positional method",
        )
        return command

    to_hf = add_command("to-hf", export, "DIR", "checkpoint folder -> Hugging Face folder")
    add_command("from-hf", import_folder, "FOLDER", "Hugging Face folder -> checkpoint folder")

    # What only an export has.
    to_hf.add_argument(
        "--iteration",
        type=integer(0),
        help="checkpoint to convert (default: the one `latest` names)",
    )
    to_hf.add_argument(
        "--fallback", action="store_true", help="if it is damaged, convert the newest valid one"
    )
    for option in ("--vocab-file", "--merge-file"):
        to_hf.add_argument(
            option,
            type=path_option,
            help="tokenizer file, if it is not where the checkpoint's configuration says",
        )
    to_hf.add_argument(
        "--allow-other-tokenizer",
        action="store_true",
        help="write the tokenizer although the model was trained with another one",
    )
    to_hf.add_argument(
        "--inference-mode",
        metavar="MODE",
        help="how the exported model attends, such as sinks@4+508; it then has its own code (see "
        "docs/evaluation.md; default: full)",
    )

    # Both commands write a new folder.
    options = parser.parse_args(argv)
    check_new_folder(options.output)
    options.run(options)
    print(f"wrote {options.output}")


def export(options: argparse.Namespace) -> None:
    # The checkpoint.
    source = local_checkpoint(options.source, pos_emb_module=options.pos_emb_module)
    if options.fallback:
        step = find_valid_step(source, options.iteration, fallback=True)
    else:
        step = find_step(source, options.iteration)  # load_model verifies it
    overrides = {}
    if options.pos_emb_module:
        overrides["pos_emb_module"] = options.pos_emb_module
    model, config = load_model(source, iteration_of(step), overrides=overrides)

    # The Hugging Face folder.
    saved = saved_dtype(step)
    dtype = DTYPES.get(options.dtype, saved)
    print(f"{step}: {config.model.pos_emb}, weights {saved}, converting to {dtype}")
    tokenizer = None
    if not options.no_tokenizer:
        tokenizer = TokenizerFiles.of(config, options.vocab_file, options.merge_file)
    to_hugging_face(
        model,
        config,
        options.output,
        tokenizer=tokenizer,
        dtype=dtype,
        inference_mode=options.inference_mode,
        allow_other_tokenizer=options.allow_other_tokenizer,
    )


def import_folder(options: argparse.Namespace) -> None:
    source = options.source
    if str(source).startswith(PREFIX):
        source = download(str(source))
    from_hugging_face(
        source,
        options.output,
        with_tokenizer=not options.no_tokenizer,
        dtype=DTYPES.get(options.dtype),
        pos_emb_module=options.pos_emb_module,
    )
