"""Write the data of documents.yml: C cut at blank lines, each piece a document, and whole files for
evaluation.

data/debian_c/pieces.jsonl has the first files of the training split, until there are 12 million
tokens, more than the runs read. Neighbours in the file are unrelated, because the pieces are
shuffled. split_valid and split_test next to it are the other splits.
"""

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import check_megatron  # noqa: F401
from megatron.data.indexed_dataset import open_indexed_files
from megatron.data.splits import part_span
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.utils.command_line import run_main
from megatron.utils.files import write_atomically

DATA = Path("data/debian_c")
SPLIT = "80,10,10"
TOKENS, SEED = 12_000_000, 1234


def cut_at_blank_lines(text: str) -> list[str]:
    """Return the parts of a text between blank lines, without line breaks at their ends."""
    pieces = re.split(r"\n\s*\n", text)
    return [piece.strip("\n") for piece in pieces if piece.strip()]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the pieces. Raises UserError if the dataset or its tokenizer cannot be read."""
    files = open_indexed_files(DATA / "debian_c_text_document")
    tokenizer = build_tokenizer("HFTokenizer", DATA / "tokenizer.json")

    # Pieces of the first files, in random order.
    pieces: list[str] = []
    number = tokens = 0
    while tokens < TOKENS:
        document = files.open_tokens(number, number + 1)[:]
        text = tokenizer.detokenize(document.tolist())
        pieces += cut_at_blank_lines(text.removesuffix("<|endoftext|>"))
        tokens += len(document)
        number += 1
    random.Random(SEED).shuffle(pieces)
    path = DATA / "pieces.jsonl"
    lines = [json.dumps({"text": piece}) + "\n" for piece in pieces]
    write_atomically(path, "".join(lines).encode())
    print(f"{path}: {len(pieces):,} pieces of {number:,} files")

    # The validation and the test part as datasets of their own.
    for part in ("valid", "test"):
        first, last = part_span(SPLIT, part, files.sequences, files.prefix)
        with IndexedWriter(DATA / f"split_{part}", tokenizer.vocab_size) as writer:
            writer.add(files.open_tokens(first, last)[:], files.lengths[first:last])
            writer.finish()


if __name__ == "__main__":
    sys.exit(run_main(main))
