"""Convert checkpoints: to and from Hugging Face, and to the KERPLE release's layout.

python tools/ckpts/convert.py to-hf DIR OUT        a checkpoint folder -> a Hugging Face folder
python tools/ckpts/convert.py from-hf FOLDER OUT   GPT-NeoX / Pythia (or an exported model) -> a checkpoint folder
python tools/ckpts/convert.py to-release DIR OUT   a checkpoint folder -> the release's layout, in any number of shards

DIR holds `latest`, as this project and the release write it. OUT must be new; it appears only when the converted model
gives the same logits (float32, 1e-4).
"""

import argparse
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    from megatron.config.command_line import OptionParser

    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run, source: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument("source", metavar=source, type=Path)
        made.add_argument("output", metavar="OUT", type=Path, help="the new folder")
        made.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: as they are)")
        return made

    to_hf = command("to-hf", _to_hf, "DIR", "a checkpoint folder -> a Hugging Face folder")
    to_release = command("to-release", _to_release, "DIR", "a checkpoint folder -> the release's layout")
    for made in (to_hf, to_release):
        made.add_argument("--iteration", type=int, help="the step to convert (default: the one `latest` names)")
    to_release.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="shards (default: 1)")
    to_hf.add_argument("--vocab-file", help="of the tokenizer, where it is not where the checkpoint says")
    to_hf.add_argument("--merge-file", help="of the tokenizer, where it is not where the checkpoint says")
    to_hf.add_argument("--pos-emb-module", help="file or module that registers the model's positional method")
    from_hf = command("from-hf", _from_hf, "FOLDER", "a Hugging Face folder -> a checkpoint folder")
    for made in (to_hf, from_hf):
        made.add_argument("--no-tokenizer", action="store_true", help="convert the model alone")
    return parser.parse_args(arguments)


def _load(options: argparse.Namespace, **overrides: str):
    """(model, configuration, dtype of the result, folder of the step)."""
    from megatron.checkpoint.convert.weights import DTYPES
    from megatron.checkpoint.directory import find_step, layer_files
    from megatron.checkpoint.storage import load_tensors
    from megatron.inference import load_model

    step = find_step(options.source, options.iteration)
    model, config = load_model(options.source, options.iteration, overrides=overrides)
    stored = load_tensors(layer_files(step)[0][0])["word_embeddings.weight"].dtype
    dtype = DTYPES[options.dtype] if options.dtype else stored
    print(f"{step}: {config.model.pos_emb}, weights {stored}, converted as {dtype}")
    return model, config, dtype, step


def _to_hf(options: argparse.Namespace) -> None:
    from megatron.checkpoint.convert import to_hugging_face
    from megatron.checkpoint.convert.tokenizer_files import TokenizerFiles

    overrides = {"pos_emb_module": options.pos_emb_module} if options.pos_emb_module else {}
    model, config, dtype, _ = _load(options, **overrides)
    tokenizer = None if options.no_tokenizer else TokenizerFiles.of(config, options.vocab_file, options.merge_file)
    to_hugging_face(model, config, options.output, tokenizer=tokenizer, dtype=dtype)


def _from_hf(options: argparse.Namespace) -> None:
    from megatron.checkpoint.convert import from_hugging_face
    from megatron.checkpoint.convert.weights import DTYPES

    dtype = DTYPES[options.dtype] if options.dtype else None
    from_hugging_face(options.source, options.output, with_tokenizer=not options.no_tokenizer, dtype=dtype)


def _to_release(options: argparse.Namespace) -> None:
    from megatron.checkpoint.convert import to_release
    from megatron.checkpoint.directory import STEP

    model, config, dtype, step = _load(options)
    iteration = int(STEP.fullmatch(step.name)[1])
    to_release(model, config, options.output, iteration=iteration, tensor_parallel=options.tensor_parallel, dtype=dtype)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    options.run(options)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    # In place of this script's folder, whose inspect.py is not the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.config.command_line import run_main

    sys.exit(run_main(main))
