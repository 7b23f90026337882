"""GPT-NeoX's command line of `kerple convert to-hf`.

python tools/ckpts/convert_neox_to_hf.py --input_dir DIR/global_stepN --config_file CONFIG.yml --output_dir OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.checkpoint.directory import iteration_of
from megatron.checkpoint.layers import DTYPES
from megatron.cli.convert import main
from megatron.utils.command_line import OptionParser, run_main

if __name__ == "__main__":
    parser = OptionParser(description=__doc__)
    parser.add_argument("--input-dir", required=True, type=Path, metavar="DIR/global_stepN", help="the checkpoint")
    parser.add_argument("--config-file", help="has no effect: the checkpoint contains its configuration")
    parser.add_argument("--output-dir", required=True, metavar="OUT", help="the new folder")
    parser.add_argument("--precision", choices=("auto", *DTYPES), default="auto", help="auto: unchanged (default)")
    parser.add_argument("--no-save-tokenizer", action="store_true", help="convert only the model")
    parser.add_argument(
        "--architecture",
        choices=("neox", "llama", "mistral"),
        help="has no effect: the structure of the model determines its class",
    )
    options = parser.parse_args()

    def convert() -> None:
        step = options.input_dir.absolute()
        words = ["to-hf", str(step.parent), options.output_dir, "--iteration", str(iteration_of(step))]
        if options.precision != "auto":
            words += ["--dtype", options.precision]
        main([*words, *["--no-tokenizer"] * options.no_save_tokenizer])

    sys.exit(run_main(convert))
