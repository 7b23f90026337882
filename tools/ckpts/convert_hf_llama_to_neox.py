"""GPT-NeoX's command line of `kerple convert from-hf`.

python tools/ckpts/convert_hf_llama_to_neox.py --tp 4 --model ORG/NAME --model_path OUT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.convert import main
from megatron.utils.command_line import OptionParser, integer, path_option, run_main

if __name__ == "__main__":
    parser = OptionParser(description=__doc__)
    parser.add_argument(
        "--model",
        type=path_option,
        required=True,
        metavar="ORG/NAME",
        help="model on the Hugging Face hub, or a folder",
    )
    parser.add_argument(
        "--model-path", type=path_option, required=True, metavar="OUT", help="the new folder"
    )
    parser.add_argument(
        "--tp", type=integer(1, 1024), help="has no effect: a checkpoint loads at any size"
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="convert only the model")
    options = parser.parse_args()
    # A folder, or the name of a model on the hub.
    source = options.model
    if not Path(source).is_dir():
        source = f"hf:{source}"
    words = ["from-hf", source, options.model_path, *["--no-tokenizer"] * options.no_tokenizer]
    sys.exit(run_main(lambda: main(words)))
