"""Prepare a dataset by name: python prepare_data.py [-d DIR] [-t TOKENIZER] [--from PATH] DATASET

The result is DIR/DATASET/DATASET_text_document.bin and .idx, what `data-path` names.
"""

import sys
from pathlib import Path

import check_megatron  # noqa: F401
from megatron.cli.dataset_options import run_tool, words
from megatron.config.command_line import OptionParser
from megatron.data.prepare import DATASETS, EMBEDDED, KNOWN_DATASETS, PrepareOptions, default_workers, prepare
from megatron.tokenizer import TOKENIZER_TYPES


def parse_arguments(arguments: list[str] | None = None) -> PrepareOptions:
    parser = OptionParser(
        description=__doc__.splitlines()[0],
        epilog=f"{EMBEDDED} needs no --from: it is made from the sources of the running Python's standard library. "
        + " ".join(f"{name}: {known.ways}." for name, known in KNOWN_DATASETS.items()),
    )
    parser.add_argument("dataset", metavar="DATASET", help=f"one of {', '.join(DATASETS)}")
    parser.add_argument("-d", "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "-t",
        "--tokenizer",
        metavar="TOKENIZER",
        help=f"one of {', '.join(TOKENIZER_TYPES)}; default: GPT2BPETokenizer, for {EMBEDDED} a BPE trained on it",
    )
    parser.add_argument("-v", "--vocab-file", help="vocabulary (GPT-2's JSON) or tokenizer.json")
    parser.add_argument("-m", "--merge-file", help="merges of GPT-2's BPE")
    parser.add_argument(
        "--vocab-size", type=int, default=2048, help="of the BPE that is trained without -t (default: %(default)s)"
    )
    parser.add_argument(
        "--from",
        dest="sources",
        action="append",
        default=[],
        metavar="PATH",
        help="file or folder to read the text from, local or on an object store (s3://...); may be given several times",
    )
    parser.add_argument(
        "--url",
        dest="urls",
        action="append",
        default=[],
        metavar="URL[#sha256=...]",
        help="file to download to DIR/DATASET/downloads, going on where an interrupted download stopped; may be given "
        "several times",
    )
    parser.add_argument("--hf", metavar="NAME", help="dataset of the Hugging Face hub to stream (needs `datasets`)")
    parser.add_argument("--hf-config", metavar="CONFIG", help="its configuration, where it has several")
    parser.add_argument("--hf-split", default="train", metavar="SPLIT", help="its split (default: %(default)s)")
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="name of the text in JSON or tables (default: %(default)s)"
    )
    parser.add_argument(
        "--suffixes",
        default="",
        metavar=".EXT,...",
        help="read a tree or tar of source files: those with these endings, one document each (e.g. .c,.h)",
    )
    parser.add_argument("--workers", type=int, default=default_workers(), help="processes (default: all processors)")
    parser.add_argument("--ftfy", action="store_true", help="mend broken Unicode with the package ftfy")
    parser.add_argument(
        "--bad-documents", choices=("fail", "skip"), default="fail", help="on an unreadable document (default: fail)"
    )
    parser.add_argument("-f", "--force", action="store_true", help="make it again even if it is there")
    found = parser.parse_args(arguments)
    return PrepareOptions(
        dataset=found.dataset,
        directory=found.data_dir,
        tokenizer_type=found.tokenizer,
        vocab_file=found.vocab_file,
        merge_file=found.merge_file,
        vocab_size=found.vocab_size,
        sources=tuple(found.sources),
        urls=tuple(found.urls),
        hub_name=found.hf,
        hub_config=found.hf_config,
        hub_split=found.hf_split,
        text_key=found.text_key,
        suffixes=tuple(words([found.suffixes])),
        workers=found.workers,
        ftfy=found.ftfy,
        skip_bad=found.bad_documents == "skip",
        rebuild=found.force,
    )


def main() -> None:
    prepare(parse_arguments())


if __name__ == "__main__":
    sys.exit(run_tool(main))
