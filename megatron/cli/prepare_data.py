"""The command prepare_data.py: prepares a dataset by name.

The result is DIR/DATASET/DATASET_text_document.bin and .idx, which `data-path` names.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron.cli.dataset_options import add_bad_documents_argument, add_limit_argument, split_words
from megatron.preparation.prepare import (
    DATASETS,
    EMBEDDED,
    EMBEDDED_VOCAB_SIZE,
    KNOWN_DATASETS,
    PrepareOptions,
    prepare,
)
from megatron.tokenizer.tokenizer import TOKENIZER_TYPES
from megatron.utils.command_line import OptionParser, integer, path_option
from megatron.utils.processes import available_cores


def parse_arguments(argv: Sequence[str] | None = None) -> PrepareOptions:
    downloaded = [name for name, known in KNOWN_DATASETS.items() if known.url is not None]
    sources = " ".join(f"{name}: {known.sources}." for name, known in KNOWN_DATASETS.items())

    # The dataset.
    parser = OptionParser(
        description="Prepare a dataset by name: python prepare_data.py [-d DIR] [-t TOKENIZER] "
        "[--from PATH] [DATASET]",
        epilog=f"{', '.join(downloaded)} are downloaded if no source is given. {EMBEDDED} is built "
        "from the sources of Python's standard library. Any other name with --from or --url "
        "prepares your own text: documents in random order, with a BPE tokenizer trained on them. "
        f"{sources}",
    )
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        nargs="?",
        default="enwik8",
        help=f"one of {', '.join(DATASETS)}, or a name for your own text (default: enwik8)",
    )
    parser.add_argument(
        "-d",
        "--data-dir",
        dest="directory",
        type=Path,
        default=Path("data"),
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )

    # The tokenizer.
    parser.add_argument(
        "-t",
        "--tokenizer",
        dest="tokenizer_type",
        metavar="TOKENIZER",
        help=f"one of {', '.join(TOKENIZER_TYPES)}; default: GPT2BPETokenizer; for {EMBEDDED} and "
        "your own text a BPE trained on it",
    )
    parser.add_argument(
        "-v",
        "--vocab-file",
        "--vocab",
        type=path_option,
        help="tokenizer.json, or GPT-2's vocabulary (JSON; without -v and -m, downloaded to "
        "DIR/gpt2-vocab.json)",
    )
    parser.add_argument("-m", "--merge-file", type=path_option, help="GPT-2's BPE merges")
    parser.add_argument(
        "--vocab-size",
        type=integer(1, 2**24),
        help=f"vocabulary size of the BPE trained without -t (default: {EMBEDDED}: "
        f"{EMBEDDED_VOCAB_SIZE}; own text: 1024, 4096 or 16384, for its size)",
    )

    # Where the documents come from.
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        type=path_option,
        default=[],
        metavar="PATH",
        help="file or folder to read; may be repeated",
    )
    parser.add_argument(
        "--url",
        dest="urls",
        action="append",
        default=[],
        metavar="URL[#sha256=...]",
        help="file to download to DIR/DATASET/downloads; may be repeated",
    )
    parser.add_argument(
        "--hf",
        dest="hub_name",
        metavar="NAME",
        help="dataset of the Hugging Face hub to stream (needs `datasets`)",
    )
    parser.add_argument(
        "--hf-config",
        dest="hub_config",
        metavar="CONFIG",
        help="configuration of that dataset, if it has several",
    )
    parser.add_argument(
        "--hf-split",
        dest="hub_split",
        default="train",
        metavar="SPLIT",
        help="split to read (default: %(default)s)",
    )
    parser.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key of the text in JSON or tables (default: %(default)s)",
    )
    parser.add_argument(
        "--suffixes",
        default="",
        metavar=".EXT,...",
        help="read a source tree (folder or tar): files with these extensions, one document each "
        "(e.g. .c,.h)",
    )

    # How to process the documents.
    add_limit_argument(parser)
    parser.add_argument(
        "--workers",
        type=integer(1, 1024),
        default=available_cores(),
        help="number of processes (default: one per processor)",
    )
    parser.add_argument(
        "--ftfy", action="store_true", help="repair broken Unicode with the package ftfy"
    )
    add_bad_documents_argument(parser)
    parser.add_argument(
        "-f",
        "--force",
        dest="rebuild",
        action="store_true",
        help="replace a dataset of the same name",
    )

    # The options have the names that the preparation uses.
    values = vars(parser.parse_args(argv))
    values["sources"], values["urls"] = tuple(values["sources"]), tuple(values["urls"])
    values["suffixes"] = tuple(split_words([values["suffixes"]]))
    return PrepareOptions(skip_bad=values.pop("bad_documents") == "skip", **values)


def main(argv: Sequence[str] | None = None) -> None:
    prepare(parse_arguments(argv))
