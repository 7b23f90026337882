"""Count documents, tokens and bytes per token of every subset of the Pile in text files; nothing is written.

python tools/datasets/count_subsets.py --input 00.jsonl.zst --tokenizer-type HFTokenizer --vocab-file tokenizer.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_input_arguments, add_tokenizer_arguments, new_parser, run_tool, words


def main() -> None:
    from megatron.data.chunks import START
    from megatron.data.documents import DocumentOptions, SubsetCount, count_subsets
    from megatron.data.input_files import find_files
    from megatron.data.progress import CorpusProgress
    from megatron.data.readers import Corpus
    from megatron.data.workers import TokenizerFiles, encode_tasks, tasks

    parser = new_parser(__doc__)
    add_input_arguments(parser)
    parser.add_argument("--jsonl-keys", nargs="+", default=["text"], help="keys to count together (default: text)")
    add_tokenizer_arguments(parser)
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    suffixes = words(arguments.suffixes)
    options = DocumentOptions(tuple(arguments.jsonl_keys), skip_bad=arguments.bad_documents == "skip")
    files = TokenizerFiles(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
    source = Corpus(find_files(words(arguments.input), suffixes), suffixes, (*options.keys, "meta"))
    total, subsets, bad = SubsetCount(), {}, 0
    with CorpusProgress("counting", source.total_bytes) as display:
        todo = tasks(source, START)
        for task, counts in encode_tasks(todo, files.build(), files, options, arguments.workers, count_subsets):
            for name, count in counts.subsets.items():
                subsets.setdefault(name or "(none)", SubsetCount()).add(count)
                total.add(count)
            bad += len(counts.bad)
            display.update(task.bytes_read, total.documents, total.tokens, total.text_bytes)
    rows = [*sorted(subsets.items(), key=lambda item: -item[1].tokens), ("total", total)]
    if arguments.json:
        print(json.dumps({"unreadable": bad, "subsets": {name: figures(count) for name, count in rows}}))
    else:
        print_table(rows, total)
        if bad:
            print(f"left out: {bad:,} unreadable documents")


def figures(count) -> dict:
    return {**vars(count), "bytes_per_token": count.text_bytes / max(count.tokens, 1)}


def print_table(rows, total) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("subset", *("documents", "tokens", "share of tokens", "MB of text", "bytes per token"))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, count in rows:
        share = f"{count.tokens / max(total.tokens, 1):.1%}"
        size, rate = f"{count.text_bytes / 1e6:,.1f}", f"{count.text_bytes / max(count.tokens, 1):.3f}"
        table.add_row(name, f"{count.documents:,}", f"{count.tokens:,}", share, size, rate)
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(run_tool(main))
