"""GPT-NeoX's command line of `kerple convert to-hf`.

python tools/ckpts/convert_neox_to_hf.py --input_dir DIR/global_stepN --config_file CONFIG.yml
--output_dir OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.cli.convert import main
from megatron.convert.hugging_face_config import stock_type
from megatron.utils.command_line import OptionParser, run_main
from megatron.utils.errors import UserError

# GPT-NeoX's names of transformers' model types.
MODEL_TYPES = {"neox": "gpt_neox", "llama": "llama", "mistral": "mistral"}

if __name__ == "__main__":
    parser = OptionParser(description=__doc__)
    parser.add_argument(
        "--input-dir", required=True, type=Path, metavar="DIR/global_stepN", help="the checkpoint"
    )
    parser.add_argument(
        "--config-file", help="has no effect: the checkpoint contains its configuration"
    )
    parser.add_argument("--output-dir", required=True, metavar="OUT", help="the new folder")
    parser.add_argument(
        "--precision", choices=("auto", *DTYPES), default="auto", help="auto: unchanged (default)"
    )
    parser.add_argument("--no-save-tokenizer", action="store_true", help="convert only the model")
    parser.add_argument(
        "--vocab-is-hf-tokenizer", action="store_true", help="has no effect: it is one if it can be"
    )
    parser.add_argument(
        "--allow-other-tokenizer", action="store_true", help="as of kerple convert to-hf"
    )
    parser.add_argument(
        "--architecture",
        choices=tuple(MODEL_TYPES),
        help="an error if the structure of the model is another one (default: that of the model)",
    )
    options = parser.parse_args()

    def convert() -> None:
        step = options.input_dir.absolute()
        words = [
            "to-hf",
            str(step.parent),
            options.output_dir,
            "--iteration",
            str(iteration_of(step)),
        ]
        if options.precision != "auto":
            words += ["--dtype", options.precision]
        if options.no_save_tokenizer:
            words.append("--no-tokenizer")
        if options.allow_other_tokenizer:
            words.append("--allow-other-tokenizer")
        if options.architecture is not None:
            model_type = stock_type(checkpoint_config(step))
            if model_type != MODEL_TYPES[options.architecture]:
                raise UserError(
                    f"--architecture {options.architecture}: {step} is a model of type "
                    f"{model_type or 'kerple'} in transformers; leave out --architecture"
                )
        main(words)

    sys.exit(run_main(convert))
