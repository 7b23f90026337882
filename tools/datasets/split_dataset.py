"""Divide a .bin/.idx dataset by documents, for evaluation on text that was held out, or for blends per split.

python tools/datasets/split_dataset.py --input data/github_text_document --split 969,30,1 --output-prefix data/github

writes data/github_train, data/github_valid and data/github_test. The bounds are those of training with the same
`split`, so that a model trained on data-path with that split has seen no document of the other parts.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import new_parser, run_tool


def main() -> None:
    from megatron.data.rewriting import split

    parser = new_parser(__doc__)
    parser.add_argument("--input", required=True, metavar="PREFIX", help="path without .bin and .idx")
    parser.add_argument("--split", default="969,30,1", help="shares of train, valid and test (default: %(default)s)")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="_train, _valid and _test are appended"
    )
    arguments = parser.parse_args()
    for written in split(arguments.input, arguments.split, arguments.output_prefix).values():
        print(f"{written.prefix}.bin/.idx: {written.documents:,} documents, {written.tokens:,} tokens")


if __name__ == "__main__":
    sys.exit(run_tool(main))
