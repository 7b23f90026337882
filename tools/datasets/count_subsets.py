"""Count documents, tokens and bytes per token for each Pile subset in text files. Writes no files.

python tools/datasets/count_subsets.py --input 00.jsonl.zst --tokenizer-type HFTokenizer --vocab-file tokenizer.json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import (
    add_input_arguments,
    add_tokenizer_arguments,
    new_parser,
    split_inputs,
    split_words,
)
from megatron.preparation.documents import DocumentOptions, SkippedDocuments
from megatron.preparation.encoding import SubsetCount, count_subsets, process_in_order, work_items
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import START, FileCorpus
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import integer, run_main
from megatron.utils.errors import visible
from megatron.utils.progress import Progress


def main(argv: Sequence[str] | None = None) -> None:
    # Options, like those of preprocessing.
    parser = new_parser(__doc__)
    add_input_arguments(parser)
    parser.add_argument("--jsonl-keys", nargs="+", default=["text"], help="keys to count together (default: text)")
    add_tokenizer_arguments(parser)
    parser.add_argument(
        "--workers", type=integer(1, 1024), default=1, help="number of tokenizing processes (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)

    # The same input as in preprocessing, plus the metadata that names the subset.
    suffixes = split_words(arguments.suffixes)
    options = DocumentOptions(tuple(arguments.jsonl_keys), skip_bad=arguments.bad_documents == "skip")
    tokenizer_files = TokenizerFiles(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
    source = FileCorpus(find_files(split_inputs(arguments.input), suffixes), suffixes, (*options.keys, "meta"))

    # Count in parallel. Without metadata, a document is in no subset.
    subsets: dict[str, SubsetCount] = {}
    total, rejected = SubsetCount(), SkippedDocuments()
    with Progress("counting", source.total_bytes, unit="MB") as display:
        results = process_in_order(
            work_items(source, START),
            count_subsets,
            tokenizer_files.build(),
            tokenizer_files,
            options,
            arguments.workers,
        )
        for item, counts in results:
            for name, count in counts.subsets.items():
                subsets.setdefault(name or "(none)", SubsetCount()).add(count)
                total.add(count)
            rejected.add(counts.skipped)
            status = f"{total.documents:,} documents, {total.tokens:,} tokens"
            display.update(item.bytes_read, status, total.text_bytes / 1e6)

    # Largest subsets first.
    rows = [*sorted(subsets.items(), key=lambda item: -item[1].tokens), ("total", total)]
    if arguments.json:
        counts_by_name = {}
        for name, count in rows:
            counts_by_name[name] = {**vars(count), "bytes_per_token": count.text_bytes / max(count.tokens, 1)}
        print(json.dumps({"unreadable": rejected.bad, "subsets": counts_by_name}))
    else:
        print_table(rows, total)
        for line in rejected.lines():
            print(line)


def print_table(rows: Sequence[tuple[str, SubsetCount]], total: SubsetCount) -> None:
    table = Table("subset", "documents", "tokens", "share of tokens", "MB of text", "bytes per token")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, count in rows:
        table.add_row(
            escape(visible(name)),
            f"{count.documents:,}",
            f"{count.tokens:,}",
            f"{count.tokens / max(total.tokens, 1):.1%}",
            f"{count.text_bytes / 1e6:,.1f}",
            f"{count.text_bytes / max(count.tokens, 1):.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(run_main(main))
