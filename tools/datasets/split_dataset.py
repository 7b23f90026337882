"""Split a .bin/.idx dataset by documents, to evaluate on held-out text or to blend the parts separately.

python tools/datasets/split_dataset.py --input data/github_text_document --split 969,30,1 --output-prefix data/github

writes data/github_train, data/github_valid and data/github_test. Training with the same `split` uses the same
boundaries, so a model trained on data-path with that split has not seen any document of the other parts.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import new_parser
from megatron.preparation.dataset_tools import split
from megatron.utils.command_line import run_main


def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--input", required=True, metavar="PREFIX", help="path without .bin and .idx")
    parser.add_argument("--split", default="969,30,1", help="shares of train, valid and test (default: %(default)s)")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="_train, _valid and _test are appended"
    )
    arguments = parser.parse_args(argv)
    for written in split(arguments.input, arguments.split, arguments.output_prefix).values():
        print(f"{written.prefix}.bin/.idx: {written.documents:,} documents, {written.tokens:,} tokens")


if __name__ == "__main__":
    sys.exit(run_main(main))
