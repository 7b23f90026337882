"""Merge several .bin/.idx datasets: the documents of all inputs, in the order of the inputs.

python tools/datasets/merge_datasets.py --input data/a_text_document data/b_text_document
--output-prefix data/both
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.preparation.merging import merge
from megatron.utils.command_line import docstring_parser, path_option, run_main


def main(argv: Sequence[str] | None = None) -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument(
        "--input",
        type=path_option,
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="path without .bin and .idx",
    )
    parser.add_argument("--output-prefix", type=path_option, required=True, metavar="PREFIX")
    arguments = parser.parse_args(argv)
    written = merge(arguments.input, arguments.output_prefix)
    print(
        f"{arguments.output_prefix}.bin/.idx: {written.documents:,} documents, {written.tokens:,} "
        "tokens"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
