"""Train a byte-level BPE tokenizer on text files.

python tools/datasets/train_tokenizer.py --input corpus.jsonl.zst --vocab-size 8192 --output
tokenizer.json

Use the result with `tokenizer-type: HFTokenizer` and `vocab-file: tokenizer.json`.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_input_arguments, split_paths, split_words
from megatron.preparation.documents import DocumentOptions, SkippedDocuments, read_texts
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import FileCorpus
from megatron.tokenizer.hugging_face import train_bpe
from megatron.utils.command_line import docstring_parser, integer, number, run_main
from megatron.utils.errors import UserError
from megatron.utils.files import check_writable, write_atomically


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = docstring_parser(__doc__)
    add_input_arguments(parser)
    parser.add_argument(
        "--jsonl-keys", nargs="+", default=["text"], help="keys to train on (default: text)"
    )
    parser.add_argument(
        "--vocab-size",
        type=integer(1, 2**24),
        required=True,
        help="number of ids, including <|endoftext|> and 256 bytes",
    )
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument(
        "--max-megabytes",
        type=number(0, above=True),
        help="train on the first MB of text only, in whole documents (default: all); memory use is "
        "proportional to it",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    if arguments.output.is_dir():
        raise UserError(f"--output {arguments.output}: is a folder; choose a file")
    check_writable(arguments.output.parent, "--output")

    # The texts of all documents; unreadable ones are counted.
    suffixes = split_words(arguments.suffixes)
    options = DocumentOptions(
        tuple(arguments.jsonl_keys), skip_bad=arguments.bad_documents == "skip"
    )
    corpus = FileCorpus(find_files(split_paths(arguments.input), suffixes), suffixes, options.keys)
    rejected = SkippedDocuments()
    texts = filter(None, read_texts(corpus.chunks(), options, rejected))
    first = next(texts, None)
    if first is None:
        message = "there is nothing to train on: the input contains no text"
        if rejected.bad:
            message += f" ({rejected.bad:,} documents are unreadable: {rejected.examples[0]})"
        raise UserError(message)

    # Train, and write only a complete file.
    limited = limit_texts(itertools.chain([first], texts), arguments.max_megabytes)
    tokenizer = train_bpe(limited, arguments.vocab_size, progress=sys.stderr.isatty())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, tokenizer.to_str(pretty=True).encode())

    # What was trained, and what was left out.
    vocab_size = tokenizer.get_vocab_size()
    note = ""
    if vocab_size != arguments.vocab_size:
        note = f", not {arguments.vocab_size:,}: the text has no more pairs to merge"
    for line in rejected.lines():
        print(line)
    print(f"{arguments.output}: {vocab_size:,} ids{note}")


def limit_texts(texts: Iterator[str], max_megabytes: float | None) -> Iterator[str]:
    """Yield texts up to `max_megabytes`."""
    text_bytes = 0
    for text in texts:
        text_bytes += len(text.encode("utf-8"))
        yield text
        if max_megabytes is not None and text_bytes >= max_megabytes * 1e6:
            break


if __name__ == "__main__":
    sys.exit(run_main(main))
