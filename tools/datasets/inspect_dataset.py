"""Validate .bin/.idx files, and show their size, document lengths and texts.

python tools/datasets/inspect_dataset.py data/github/github_text_document

With the tokenizer (--tokenizer-type, --vocab-file, --merge-file), documents can be shown as text: --sample 0 17
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_tokenizer_arguments, new_parser
from megatron.preparation.dataset_tools import Inspection, decode_document, inspect
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.command_line import integer, run_main
from megatron.utils.errors import visible


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("prefix", nargs="+", help="path without .bin and .idx")
    parser.add_argument(
        "--sample", type=integer(0), nargs="+", default=[], metavar="N", help="show these documents, from 0"
    )
    parser.add_argument(
        "--sample-tokens", type=integer(1), default=200, help="tokens to show of each document (default: %(default)s)"
    )
    add_tokenizer_arguments(parser, required=False)
    arguments = parser.parse_args(argv)
    if arguments.sample and not arguments.tokenizer_type:
        parser.error("--sample needs the tokenizer: --tokenizer-type and its files")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    tokenizer = None
    if arguments.tokenizer_type:
        tokenizer = build_tokenizer(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
    for prefix in arguments.prefix:
        inspection, files = inspect(prefix, tokenizer)
        print_table(inspection)
        for number in arguments.sample:
            assert tokenizer is not None  # checked by parse_arguments
            text = decode_document(files, number, tokenizer, arguments.sample_tokens)
            print(f"--- document {number}, {int(files.lengths[number]):,} tokens")
            print(visible(text))


def print_table(inspection: Inspection) -> None:
    table = Table(title=escape(visible(inspection.prefix)), show_header=False)
    rate = "unknown" if inspection.bytes_per_token is None else f"{inspection.bytes_per_token:.3f}"
    quantiles = ", ".join(f"{percent}%: {length:,}" for percent, length in inspection.length_quantiles.items())
    for label, value in (
        ("documents", f"{inspection.documents:,}"),
        ("tokens", f"{inspection.tokens:,}, stored as {inspection.dtype}, {inspection.megabytes:,.1f} MB"),
        ("token ids", f"{inspection.smallest_id} to {inspection.largest_id}"),
        ("tokens per document", f"mean {inspection.mean_length:,.1f}; {quantiles}"),
        ("bytes per token", f"{rate} ({inspection.text_from})"),
        ("integrity", f"complete; checksum: {inspection.checksum}"),
        ("SHA-256 of the .bin", inspection.sha256),
    ):
        table.add_row(label, value)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(run_main(main))
