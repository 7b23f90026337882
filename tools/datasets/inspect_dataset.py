"""Look into .bin/.idx files: whether they are whole, how much they hold, how long the documents are, what they say.

python tools/datasets/inspect_dataset.py data/github/github_text_document --histogram lengths.png

With the tokenizer (--tokenizer-type, --vocab-file, --merge-file) documents are shown as text: --sample 0 17
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_tokenizer_arguments, new_parser, run_tool


def parse_arguments(arguments: list[str] | None = None):
    parser = new_parser(__doc__)
    parser.add_argument("prefix", nargs="+", help="path without .bin and .idx")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png", help="draw how long the documents are")
    parser.add_argument("--sample", type=int, nargs="+", default=[], metavar="N", help="show these documents, from 0")
    parser.add_argument("--sample-tokens", type=int, default=200, help="of each, so many (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, one line per dataset")
    add_tokenizer_arguments(parser, required=False)
    found = parser.parse_args(arguments)
    if found.sample and not found.tokenizer_type:
        parser.error("--sample needs the tokenizer: --tokenizer-type, and its files")
    if found.sample_tokens < 1:
        parser.error(f"--sample-tokens is {found.sample_tokens}; it must be at least 1")
    if found.histogram and len(found.prefix) > 1:
        parser.error("--histogram draws one dataset")
    return found


def main() -> None:
    from megatron.data.inspection import decode_document, draw_lengths, inspect
    from megatron.data.workers import TokenizerFiles

    arguments = parse_arguments()
    tokenizer = None
    if arguments.tokenizer_type:
        tokenizer = TokenizerFiles(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file).build()
    for prefix in arguments.prefix:
        found, files = inspect(prefix, tokenizer)
        if arguments.json:
            print(json.dumps(asdict(found)))
        else:
            print_table(found)
        if arguments.histogram:
            draw_lengths(files, arguments.histogram)
            print(f"{arguments.histogram}: lengths of the documents", file=sys.stderr if arguments.json else sys.stdout)
        for number in arguments.sample:
            text = decode_document(files, number, tokenizer, arguments.sample_tokens)
            print(f"--- document {number}, {int(files.lengths[number]):,} tokens")
            print(text)


def print_table(found) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=found.prefix, show_header=False)
    rate = "not known" if found.bytes_per_token is None else f"{found.bytes_per_token:.3f}"
    quantiles = ", ".join(f"{percent}%: {length:,}" for percent, length in found.length_quantiles.items())
    for row in (
        ("documents", f"{found.documents:,}"),
        ("tokens", f"{found.tokens:,}, stored as {found.dtype}, {found.megabytes:,.1f} MB"),
        ("token ids", f"{found.smallest_id} to {found.largest_id}"),
        ("tokens per document", f"{found.mean_length:,.1f} on average; {quantiles}"),
        ("bytes per token", f"{rate} ({found.text_from})"),
        ("integrity", f"whole; checksum: {found.checksum}"),
        ("SHA-256 of the .bin", found.sha256),
    ):
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(run_tool(main))
