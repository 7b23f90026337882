"""Tokenize text files into .bin/.idx, at GPT-NeoX's command line.

python tools/datasets/preprocess_data.py --input a.jsonl.zst,b.txt --output-prefix data/mine \
    --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

writes data/mine_text_document.bin and .idx (data-path: data/mine_text_document).
"""

import argparse
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        help="files or folders, local or on an object store (s3://...), separated by commas or spaces: jsonl, txt, "
        "parquet, lm-dataformat archives, tar and zip of these, plain or compressed (gz, zst, xz)",
    )
    data.add_argument(
        "--suffixes",
        default="",
        metavar=".EXT,...",
        help="read trees or tars of source files: those with these endings, one document each (e.g. .c,.h)",
    )
    data.add_argument(
        "--jsonl-keys", nargs="+", default=["text"], help="keys to take; each makes a dataset (default: text)"
    )
    data.add_argument("--num-docs", type=int, help="number of documents, if known, for the progress display")
    data.add_argument("--pile-subset", help="keep only documents whose meta.pile_set_name is this (e.g. Github)")
    data.add_argument(
        "--bad-documents",
        choices=("fail", "skip"),
        default="fail",
        help="what to do about a line that is not JSON, lacks the key or is not UTF-8 (default: fail)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", required=True, help="HFTokenizer, GPT2BPETokenizer, CharLevelTokenizer")
    tokenizer.add_argument("--vocab-file", help="vocabulary (GPT-2's JSON) or tokenizer.json")
    tokenizer.add_argument("--merge-file", help="merges of GPT-2's BPE")
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
    inputs = [path for group in arguments.input for path in group.split(",") if path]
    suffixes = tuple(suffix for suffix in arguments.suffixes.split(",") if suffix)
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
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.config.arguments import run_main

    sys.exit(run_main(main))
