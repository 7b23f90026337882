"""Train a byte-level BPE tokenizer on text files.

python tools/datasets/train_tokenizer.py --input corpus.jsonl.zst --vocab-size 8192 --output tokenizer.json

The result is for `tokenizer-type: HFTokenizer`, `vocab-file: tokenizer.json`.
"""

import argparse
import sys
from pathlib import Path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--input",
        action="extend",
        nargs="+",
        required=True,
        help="files or folders, separated by commas or spaces, of the kinds that preprocess_data.py reads",
    )
    parser.add_argument("--jsonl-keys", nargs="+", default=["text"], help="keys to take (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, help="ids, <|endoftext|> and 256 bytes included")
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument(
        "--bad-documents", choices=("fail", "skip"), default="fail", help="on an unreadable document (default: fail)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    from megatron.data.documents import DocumentOptions, read_texts
    from megatron.data.input_files import find_files
    from megatron.data.readers import Corpus
    from megatron.files import write_atomically
    from megatron.tokenizer.training import train_bpe

    arguments = parse_arguments()
    inputs = [path for group in arguments.input for path in group.split(",") if path]
    options = DocumentOptions(tuple(arguments.jsonl_keys), skip_bad=arguments.bad_documents == "skip")
    texts = read_texts(Corpus(find_files(inputs)).chunks(), options)
    tokenizer = train_bpe(texts, arguments.vocab_size, progress=sys.stderr.isatty())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, tokenizer.to_str(pretty=True).encode())
    reached = tokenizer.get_vocab_size()
    short = "" if reached == arguments.vocab_size else f", not {arguments.vocab_size:,}: no pair is left to merge"
    print(f"{arguments.output}: {reached:,} ids{short}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron.config.arguments import run_main

    sys.exit(run_main(main))
