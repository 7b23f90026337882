"""Tokenize text files into .bin/.idx, at GPT-NeoX's command line.

python tools/datasets/preprocess_data.py --input a.jsonl.zst,b.txt --output-prefix data/mine \
    --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

writes data/mine_text_document.bin and .idx (data-path: data/mine_text_document). Interrupted, killed or out of disk
space, the same command goes on where it was.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_input_arguments, add_tokenizer_arguments, new_parser, run_tool, words


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    data = parser.add_argument_group("input")
    add_input_arguments(data)
    data.add_argument(
        "--jsonl-keys", nargs="+", default=["text"], help="keys to take; each makes a dataset (default: text)"
    )
    data.add_argument("--num-docs", type=int, help="number of documents, if known, for the progress display")
    data.add_argument("--pile-subset", help="keep only documents whose meta.pile_set_name is this (e.g. Github)")
    tokenizer = parser.add_argument_group("tokenizer")
    add_tokenizer_arguments(tokenizer)
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with <|endoftext|>")
    tokenizer.add_argument("--ftfy", action="store_true", help="mend broken Unicode with the package ftfy")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="the files are PREFIX_KEY_document.bin and .idx")
    output.add_argument(
        "--dataset-impl", choices=("mmap",), default="mmap", help="mmap, the only format there still is"
    )
    running = parser.add_argument_group("running")
    running.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1)")
    running.add_argument("--log-interval", type=int, default=100, help="documents between updates (default: 100)")
    return parser.parse_args(arguments)


def main() -> None:
    from megatron.data.documents import DocumentOptions
    from megatron.data.input_files import find_files
    from megatron.data.preprocessing import preprocess, summary
    from megatron.data.readers import Corpus
    from megatron.data.workers import TokenizerFiles

    arguments = parse_arguments()
    inputs, suffixes = words(arguments.input), words(arguments.suffixes)
    options = DocumentOptions(
        keys=tuple(dict.fromkeys(arguments.jsonl_keys)),
        subset=arguments.pile_subset,
        append_eod=arguments.append_eod,
        ftfy=arguments.ftfy,
        skip_bad=arguments.bad_documents == "skip",
    )
    manifests = preprocess(
        Corpus(find_files(inputs, suffixes), suffixes, (*options.keys, "meta")),
        arguments.output_prefix,
        TokenizerFiles(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file),
        options,
        inputs=inputs,
        workers=arguments.workers,
        num_docs=arguments.num_docs,
        log_interval=arguments.log_interval,
    )
    for key, manifest in manifests.items():
        print(summary(f"{arguments.output_prefix}_{key}_document", manifest))


if __name__ == "__main__":
    sys.exit(run_tool(main))
