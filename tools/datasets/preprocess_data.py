"""Tokenize text files into .bin/.idx, with GPT-NeoX's command line.

python tools/datasets/preprocess_data.py --input a.jsonl.zst,b.txt --output-prefix data/mine \
    --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

writes data/mine_text_document.bin and .idx (data-path: data/mine_text_document). After an
interruption, a kill or a full disk, the same command resumes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import (
    add_input_arguments,
    add_limit_argument,
    split_paths,
    split_words,
)
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.input_files import find_files
from megatron.preparation.preprocessing import preprocess, summary
from megatron.preparation.readers import FileCorpus
from megatron.tokenizer.tokenizer import TOKENIZER_TYPES, TokenizerFiles
from megatron.utils.command_line import docstring_parser, integer, path_option, run_main


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    # The documents.
    parser = docstring_parser(__doc__)
    data = parser.add_argument_group("input")
    add_input_arguments(data)
    data.add_argument(
        "--jsonl-keys",
        nargs="+",
        default=["text"],
        help="keys to tokenize, each into its own dataset (default: text)",
    )
    add_limit_argument(data)
    data.add_argument("--num-docs", type=integer(1), help="has no effect")
    data.add_argument(
        "--pile-subset", help="keep only documents with this meta.pile_set_name (e.g. Github)"
    )

    # The tokenizer, and what it does with documents.
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument(
        "--tokenizer-type", required=True, help=f"one of {', '.join(TOKENIZER_TYPES)}"
    )
    tokenizer.add_argument(
        "--vocab-file",
        "--vocab",
        type=path_option,
        help="tokenizer.json, SentencePiece model or GPT-2's vocabulary",
    )
    tokenizer.add_argument("--merge-file", type=path_option, help="GPT-2's BPE merges")
    tokenizer.add_argument(
        "--append-eod", action="store_true", help="end every document with <|endoftext|>"
    )
    tokenizer.add_argument(
        "--ftfy", action="store_true", help="repair broken Unicode with the package ftfy"
    )

    # The dataset.
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix",
        type=path_option,
        required=True,
        help="writes PREFIX_KEY_document.bin and .idx",
    )
    output.add_argument(
        "--dataset-impl", choices=("mmap",), default="mmap", help="only mmap is supported"
    )
    execution = parser.add_argument_group("execution")
    execution.add_argument(
        "--workers",
        type=integer(1, 1024),
        default=1,
        help="number of tokenizing processes (default: 1)",
    )
    execution.add_argument("--log-interval", type=integer(1), help="has no effect")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    inputs = split_paths(arguments.input)
    suffixes = split_words(arguments.suffixes)
    options = DocumentOptions(
        keys=tuple(dict.fromkeys(arguments.jsonl_keys)),
        subset=arguments.pile_subset,
        append_eod=arguments.append_eod,
        ftfy=arguments.ftfy,
        skip_bad=arguments.bad_documents == "skip",
    )
    # The subset is a value in `meta`.
    corpus = FileCorpus(find_files(inputs, suffixes), suffixes, (*options.keys, "meta"))
    tokenizer = TokenizerFiles(arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file)
    manifests = preprocess(
        corpus,
        arguments.output_prefix,
        tokenizer,
        options,
        inputs=inputs,
        workers=arguments.workers,
        limit_mb=arguments.limit_mb,
    )
    for key, manifest in manifests.items():
        print(summary(f"{arguments.output_prefix}_{key}_document", manifest))


if __name__ == "__main__":
    sys.exit(run_main(main))
