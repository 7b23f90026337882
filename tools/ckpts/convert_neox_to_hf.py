"""Convert a checkpoint to Hugging Face with GPT-NeoX's command line (this project's own is `kerple convert to-hf`).

python tools/ckpts/convert_neox_to_hf.py --input_dir checkpoints/global_step1000 --config_file my.yml \
    --output_dir hf_model --precision auto --architecture neox

The checkpoint's own configuration determines the model. --config_file may set the tokenizer's files, but must describe
the same model.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import check_megatron  # noqa: F401

import argparse
from collections.abc import Sequence

from megatron.checkpoint.configuration import model_differences
from megatron.checkpoint.directory import STEP, find_damage
from megatron.checkpoint.layers import DTYPES
from megatron.config import Config, UserError
from megatron.config.yaml_files import read_file
from megatron.convert import to_hugging_face
from megatron.convert.hugging_face_config import stock_type
from megatron.convert.output import check_new_folder
from megatron.convert.weights import saved_dtype
from megatron.inference import load_model
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import OptionParser, run_main

# --architecture -> model_type of transformers.
ARCHITECTURES = {"neox": "gpt_neox", "mistral": "mistral", "llama": "llama"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises UserError if the conversion is not possible."""
    # GPT-NeoX's options.
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="the checkpoint, .../global_stepN")
    parser.add_argument("--config-file", type=Path, required=True, help="configuration of the model (YAML)")
    parser.add_argument("--output-dir", type=Path, required=True, help="the new folder")
    parser.add_argument(
        "--precision",
        choices=("auto", *DTYPES),
        default="auto",
        help="dtype of the weights; auto: unchanged (default)",
    )
    parser.add_argument(
        "--architecture",
        choices=tuple(ARCHITECTURES),
        help="class of transformers that the model must have (default: the one with its structure)",
    )
    parser.add_argument("--no-save-tokenizer", action="store_true", help="convert only the model")
    parser.add_argument(
        "--vocab-is-hf-tokenizer", action="store_true", help="vocab-file is a folder with a tokenizer.json"
    )
    options = parser.parse_args(arguments)

    # Check what is cheap to check before the model is loaded.
    match = STEP.fullmatch(options.input_dir.name)
    if match is None:
        raise UserError(f"--input_dir {options.input_dir} is not a folder named global_stepN; give that of one step")
    check_new_folder(options.output_dir)
    if damage := find_damage(options.input_dir):
        raise UserError(damage)

    # The architecture follows from the model.
    model, saved = load_model(options.input_dir.parent, int(match[1]))
    config = _with_keys_of(options.config_file, saved)
    model_type = stock_type(config) or "gpt_neox"  # other positional methods have GPT-NeoX's blocks
    if options.architecture is not None and model_type != ARCHITECTURES[options.architecture]:
        raise UserError(
            f"--architecture {options.architecture}: the model has the structure of {model_type}; remove the option"
        )

    # Write the folder.
    tokenizer = None
    if not options.no_save_tokenizer:
        tokenizer = TokenizerFiles.of(config)
        if options.vocab_is_hf_tokenizer:
            tokenizer = TokenizerFiles("HFTokenizer", Path(tokenizer.vocab_file or ".") / "tokenizer.json")
    dtype = DTYPES.get(options.precision) or saved_dtype(options.input_dir)
    to_hugging_face(model, config, options.output_dir, tokenizer=tokenizer, dtype=dtype)
    print(f"wrote {options.output_dir}")


def _with_keys_of(path: Path, saved: Config) -> Config:
    """The checkpoint's configuration with the keys of a file. Raises UserError if the file does not match its model."""
    config = saved.updated(**{entry.key: entry.value for entry in read_file(path)})
    differences = model_differences(saved, config, evaluation=True)
    if differences:
        raise UserError(f"--config_file {path} does not match the checkpoint's model: {'; '.join(differences)}")
    return config


if __name__ == "__main__":
    sys.exit(run_main(main))
