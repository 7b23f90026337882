"""Remove exact and near-duplicate documents. Prints how many there were, and writes the rest as JSON lines.

python tools/datasets/deduplicate.py --input corpus.jsonl.zst --output unique.jsonl.zst

Documents are kept in the order of the input: of several that resemble each other, the first.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zstandard

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import add_input_arguments, new_parser, split_inputs, split_words
from megatron.preparation.deduplication import DEFAULT_THRESHOLD, Deduplicator
from megatron.preparation.documents import DocumentOptions, read_texts
from megatron.preparation.input_files import find_files
from megatron.preparation.readers import FileCorpus
from megatron.utils.command_line import number, run_main
from megatron.utils.errors import UserError
from megatron.utils.progress import Progress


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_input_arguments(parser)
    parser.add_argument("--jsonl-key", default="text", help="key of the text (default: text)")
    parser.add_argument(
        "--threshold",
        type=number(0, 1, above=True),
        default=DEFAULT_THRESHOLD,
        help="remove documents of at least this similarity (Jaccard index of 5-word shingles; default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, help="file to write, .jsonl or .jsonl.zst (default: only print the statistics)"
    )
    arguments = parser.parse_args(argv)
    if arguments.output is not None and not arguments.output.name.endswith((".jsonl", ".jsonl.zst")):
        parser.error(f"--output {arguments.output} must end in .jsonl or .jsonl.zst")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    suffixes = split_words(arguments.suffixes)
    options = DocumentOptions((arguments.jsonl_key,), skip_bad=arguments.bad_documents == "skip")
    corpus = FileCorpus(find_files(split_inputs(arguments.input), suffixes), suffixes, options.keys)
    deduplicator = Deduplicator(arguments.threshold)
    kept_bytes = text_bytes = 0
    output = arguments.output
    partial = None if output is None else output.with_name(f"{output.name}.partial")
    try:
        with (
            Progress("reading", corpus.total_bytes, unit="MB") as display,
            _open_output(partial) as stream,
        ):
            for text in filter(None, read_texts(corpus.chunks(), options)):
                content = text.encode("utf-8")
                text_bytes += len(content)
                if deduplicator.is_new(content):
                    kept_bytes += len(content)
                    stream.write(json.dumps({arguments.jsonl_key: text}, ensure_ascii=False).encode() + b"\n")
                display.update(corpus.bytes_read, f"{deduplicator.counts.documents:,} documents", text_bytes / 1e6)
    except OSError as error:
        raise UserError(f"cannot write {partial}: {error.strerror or error}") from error
    if partial is not None:
        partial.replace(output)
    print(f"{deduplicator.counts}: {kept_bytes / 1e6:,.1f} of {text_bytes / 1e6:,.1f} MB")


@contextmanager
def _open_output(path: Path | None) -> Iterator[BinaryIO]:
    with open(path or os.devnull, "wb") as stream:
        if path is None or not path.name.endswith(".zst.partial"):
            yield stream
            return
        with zstandard.ZstdCompressor().stream_writer(stream) as compressed:
            yield cast(BinaryIO, compressed)


if __name__ == "__main__":
    sys.exit(run_main(main))
