"""Train a byte-level BPE tokenizer on text files.

python tools/datasets/train_tokenizer.py --input corpus.jsonl.zst --vocab-size 8192 --output tokenizer.json

The result is for `tokenizer-type: HFTokenizer`, `vocab-file: tokenizer.json`.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_input_arguments, new_parser, run_tool, words


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_input_arguments(parser)
    parser.add_argument("--jsonl-keys", nargs="+", default=["text"], help="keys to take (default: text)")
    parser.add_argument("--vocab-size", type=int, required=True, help="ids, <|endoftext|> and 256 bytes included")
    parser.add_argument("--output", type=Path, required=True, help="the tokenizer.json to write")
    parser.add_argument(
        "--max-megabytes",
        type=float,
        help="train on the first so many MB of text (default: all); memory grows with them",
    )
    found = parser.parse_args(arguments)
    if found.max_megabytes is not None and not found.max_megabytes > 0:
        parser.error(f"--max-megabytes is {found.max_megabytes}; it must be more than 0")
    return found


def main() -> None:
    from megatron.data.documents import DocumentOptions, read_texts
    from megatron.data.input_files import find_files
    from megatron.data.progress import CorpusProgress
    from megatron.data.readers import Corpus
    from megatron.tokenizer.hugging_face import train_bpe
    from megatron.utils.errors import UserError
    from megatron.utils.files import write_atomically

    arguments = parse_arguments()
    suffixes = words(arguments.suffixes)
    options = DocumentOptions(tuple(arguments.jsonl_keys), skip_bad=arguments.bad_documents == "skip")
    corpus = Corpus(find_files(words(arguments.input), suffixes), suffixes, options.keys)
    with CorpusProgress("reading", corpus.total_bytes) as display:
        texts = filter(None, read_texts(corpus.chunks(), options))
        first = next(texts, None)
        if first is None:
            raise UserError("there is nothing to train on: the input holds no text")
        texts = itertools.chain([first], texts)
        counted = count(texts, corpus, display, arguments.max_megabytes)
        # The library shows a bar of its own for the merging that follows the reading.
        tokenizer = train_bpe(counted, arguments.vocab_size, progress=sys.stderr.isatty())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, tokenizer.to_str(pretty=True).encode())
    reached = tokenizer.get_vocab_size()
    short = "" if reached == arguments.vocab_size else f", not {arguments.vocab_size:,}: no pair is left to merge"
    print(f"{arguments.output}: {reached:,} ids{short}")


def count(texts: Iterator[str], corpus, display, max_megabytes: float | None) -> Iterator[str]:
    """The texts, while the display is kept up to date; it goes away when all are read."""
    text_bytes = 0
    for documents, text in enumerate(texts, start=1):
        text_bytes += len(text.encode("utf-8"))
        display.update(corpus.bytes_read, documents, None, text_bytes)
        yield text
        if max_megabytes is not None and text_bytes >= max_megabytes * 1e6:
            break
    display.stop()


if __name__ == "__main__":
    sys.exit(run_tool(main))
