"""Prepares a dataset by name, for prepare_data.py: from its source to
DIR/NAME/NAME_text_document.bin/.idx.
"""

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.data.indexed_dataset import open_indexed_files
from megatron.preparation.corpora import DocumentCorpus, HubCorpus, StdlibCorpus
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.download import download, file_name, redact_url
from megatron.preparation.input_files import find_files
from megatron.preparation.own_text import OwnText
from megatron.preparation.preprocessing import preprocess, summary
from megatron.preparation.readers import ChunkSource, FileCorpus
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.errors import UserError
from megatron.utils.files import read_file, write_atomically
from megatron.utils.processes import Lock

# The dataset that has no other source, and the size of its own vocabulary.
EMBEDDED, EMBEDDED_VOCAB_SIZE = "python_stdlib", 2048


@dataclass(frozen=True)
class KnownDataset:
    """A dataset of text files.

    Attributes:
        subset: its meta.pile_set_name in shards of the Pile; None keeps all documents.
        sources: where to get its files, for messages.
        url: downloaded if the user names no source; may end in #sha256=...
    """

    subset: str | None
    sources: str
    url: str | None = None


# The key of the texts in this project's recipes and in GPT-NeoX. It is part of the name of the
# output.
_TEXT = "text"

_SOURCE_OPTIONS = (
    "--from FILE-OR-FOLDER, --url URL[#sha256=...] to download, or --hf NAME to stream from the "
    "Hugging Face hub"
)
_PILE_SHARDS = (
    "shards of the Pile (jsonl.zst with meta.pile_set_name, of which {subset} is selected)"
)
_HOSTS_GONE = "the Pile's own download hosts no longer exist"

KNOWN_DATASETS = {
    "openwebtext2": KnownDataset(
        "OpenWebText2",
        "segyges/OpenWebText2 on the Hugging Face hub as jsonl.zst.tar; or "
        + _PILE_SHARDS.format(subset="OpenWebText2"),
        "https://huggingface.co/datasets/segyges/OpenWebText2/resolve/main/"
        "openwebtext2.jsonl.zst.tar",
    ),
    "github": KnownDataset(
        "Github",
        f"{_PILE_SHARDS.format(subset='Github')}; {_HOSTS_GONE}; or any tree of source files, e.g. "
        "an extracted release of the Linux kernel with --suffixes .c,.h",
    ),
    "arxiv": KnownDataset("ArXiv", f"{_PILE_SHARDS.format(subset='ArXiv')}; {_HOSTS_GONE}"),
    "pile": KnownDataset(None, f"shards of the Pile (jsonl.zst), all subsets; {_HOSTS_GONE}"),
    "pile_subset": KnownDataset(
        None,
        f"the first shard of the Pile, 00.jsonl.zst; {_HOSTS_GONE}",
        "https://the-eye.eu/public/AI/pile/train/00.jsonl.zst",
    ),
    "enwik8": KnownDataset(
        None,
        "enwik8 or enwik8.zip from the Large Text Compression Benchmark",
        "http://mattmahoney.net/dc/enwik8.zip"
        "#sha256=547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    ),
}
DATASETS = (EMBEDDED, *KNOWN_DATASETS)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)  # of the user's own dataset

# GPT-2's vocabulary and merges, which GPT-NeoX downloads to DIR if no files are given.
GPT2_FILES = (
    "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-vocab.json",
    "https://s3.amazonaws.com/models.huggingface.co/bert/gpt2-merges.txt",
)

# Increase this when the preparation steps change, so that existing datasets are not taken for new
# ones.
_RECIPE_VERSION = 3
_FILES_CHANGED = "its files changed"
_RECIPE = "prepare.json"  # in the folder of the dataset


@dataclass(frozen=True)
class PrepareOptions:
    """The options of prepare_data.py, whose help (megatron/cli/prepare_data.py) describes them.

    Attributes:
        dataset: one of DATASETS, or any other name for own text, which needs a source.
        tokenizer_type: None trains a BPE for own text (from `sources` or `urls`) and EMBEDDED, and
            otherwise means GPT2BPETokenizer.
        sources, urls: files and folders to read, and files to download. Without any source, the
            dataset's own URL.
        hub_name, hub_config, hub_split: a dataset of the Hugging Face hub, in place of `sources`
            and `urls`.
    """

    dataset: str
    directory: Path = Path("data")
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    sources: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    hub_name: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    text_key: str = _TEXT
    suffixes: tuple[str, ...] = ()
    limit_mb: float | None = None
    workers: int = 1
    ftfy: bool = False
    skip_bad: bool = False
    rebuild: bool = False


def prepare(options: PrepareOptions) -> Path:
    """Build the dataset, unless it exists and was built in the same way. Returns its prefix.

    Raises UserError if the dataset is unknown or has no source, another process is preparing it, or
    `preprocess` failed.
    """
    # The recipe: all that the tokens depend on.
    folder = options.directory / options.dataset
    prefix = folder / f"{options.dataset}_text_document"
    _check_source_options(options)
    own_text = options.dataset not in DATASETS and options.hub_name is None
    train_tokenizer = (own_text or options.dataset == EMBEDDED) and options.tokenizer_type is None
    if train_tokenizer and (options.vocab_file or options.merge_file):
        raise UserError(
            "--vocab-file and --merge-file need --tokenizer; without it, a BPE is trained on "
            f"{options.dataset}"
        )
    if not train_tokenizer and options.vocab_size is not None:
        raise UserError(
            f"--vocab-size is the size of a trained BPE, but only {EMBEDDED} and your own text "
            "(--from or --url) train one, without --tokenizer; remove it"
        )
    recipe: dict[str, object] = {
        "version": _RECIPE_VERSION,
        "dataset": options.dataset,
        "ftfy": options.ftfy,
        "text_key": options.text_key,
        "limit_mb": options.limit_mb,
    }

    # The tokenizer is part of it, unless it is trained on this text.
    urls = _urls(options)
    if train_tokenizer:
        tokenizer_files = TokenizerFiles("HFTokenizer", str(folder / "tokenizer.json"))
    else:
        tokenizer_files = _given_tokenizer(options)
        tokenizer = tokenizer_files.build()
        recipe |= {"tokenizer": tokenizer.name, "tokenizer_fingerprint": tokenizer.fingerprint}

    # So are the files, and the vocabulary size if the tokenizer is trained.
    source = _open_source(options, urls)
    recipe["corpus"] = source.identity()
    if options.suffixes:
        recipe["hidden_files"] = "skipped, as those in hidden folders"  # earlier versions read them
    if isinstance(source, OwnText):
        recipe["skip_bad"] = options.skip_bad
        if train_tokenizer and options.ftfy:
            recipe["trained_on_repaired"] = True
    if train_tokenizer:
        # The size for a text of one's own is known only after the text is read.
        default = "by the size of the text" if own_text else EMBEDDED_VOCAB_SIZE
        recipe["trained_vocab_size"] = options.vocab_size or default

    # Nothing to do if the dataset has the same recipe.
    reason = _rebuild_reason(recipe, prefix, tokenizer_files, options.skip_bad)
    if reason is None and not options.rebuild:
        print(f"{prefix}: up to date")
        return prefix
    if reason and reason != _FILES_CHANGED and not options.rebuild:
        raise UserError(
            f"{prefix} exists, but {reason}. Models that were trained on it need it: choose "
            "another --data-dir or name, or replace it with --force"
        )

    # The tokenizer, the tokens and the recipe must come from one run.
    busy_message = (
        f"another process is preparing {prefix}; wait for it to finish, or choose another "
        "--data-dir"
    )
    with Lock(folder / "prepare.lock", busy_message):
        if reason:
            print(f"{prefix}: rebuilt: {reason}")
        (folder / _RECIPE).unlink(missing_ok=True)
        if isinstance(source, DocumentCorpus) and train_tokenizer:
            texts = source.tokenizer_texts()
            vocab_size = options.vocab_size or EMBEDDED_VOCAB_SIZE
            if isinstance(source, OwnText) and options.vocab_size is None:
                vocab_size = source.vocab_size
            print(
                f"training a BPE tokenizer with {vocab_size} ids on {len(texts):,} documents of "
                f"{options.dataset}"
            )
            trained = train_bpe(texts, vocab_size, progress=sys.stderr.isatty())
            write_atomically(folder / "tokenizer.json", trained.to_str(pretty=True).encode())

        # Tokenize. The recipe comes last, so it exists only next to a complete dataset.
        read = _document_options(options)
        if options.dataset in KNOWN_DATASETS:
            read = replace(read, subset=KNOWN_DATASETS[options.dataset].subset)
        inputs = [*options.sources, *map(redact_url, urls)]
        if options.hub_name:
            inputs.append(f"hf:{options.hub_name}")
        limit_mb = options.limit_mb
        if isinstance(source, OwnText):
            limit_mb = None  # it has applied the limit
        manifests = preprocess(
            source,
            folder / options.dataset,
            tokenizer_files,
            replace(read, append_eod=True),
            inputs=inputs or [options.dataset],
            names=(_TEXT,),
            workers=options.workers,
            limit_mb=limit_mb,
        )
        write_atomically(folder / _RECIPE, (json.dumps(recipe, indent=2) + "\n").encode())

    # Report the size, and the checksum to compare with other machines.
    print(summary(prefix, manifests[options.text_key]))
    print(f"SHA-256 of the .bin: {manifests[options.text_key].sha256}")
    return prefix


def _check_source_options(options: PrepareOptions) -> None:
    """Reject missing and conflicting sources before anything is downloaded or built."""
    # The embedded dataset takes no source.
    has_source = _has_source(options)
    if options.hub_name is None and (options.hub_config, options.hub_split) != (None, "train"):
        raise UserError(
            "--hf-config and --hf-split describe a dataset of the hub; name it with --hf"
        )
    if options.dataset == EMBEDDED:
        if has_source or options.suffixes:
            raise UserError(
                f"{options.dataset} has a fixed source; remove --from, --url, --hf and --suffixes"
            )
        return

    # Your own text needs a valid name and a source, a known dataset one that is still available.
    known = KNOWN_DATASETS.get(options.dataset)
    if known is None and not has_source:
        raise UserError(
            f"unknown dataset {options.dataset!r}; known: {', '.join(DATASETS)}. To prepare your "
            f"own text under this name, pass {_SOURCE_OPTIONS}"
        )
    if known is None and not _NAME.fullmatch(options.dataset):
        raise UserError(
            f"dataset name {options.dataset!r}: use letters, digits, '_', '-' and '.', beginning "
            "with a letter or digit"
        )
    if known is not None and not has_source and known.url is None:
        raise UserError(
            f"{options.dataset} needs a source: pass {_SOURCE_OPTIONS}. It is available as: "
            f"{known.sources}. To prepare your own text, choose another name"
        )

    # Options that exclude each other.
    if options.hub_name is not None and (options.sources or options.urls or options.suffixes):
        raise UserError("--hf cannot be combined with --from, --url or --suffixes")

    # A folder that contains the output would be read again as input.
    if not options.suffixes or ".json" in options.suffixes:  # otherwise the outputs are not read
        folder = (options.directory / options.dataset).resolve()
        for source in filter(os.path.isdir, options.sources):
            if folder.is_relative_to(Path(source).resolve()):
                raise UserError(
                    f"--from {source} contains the output folder "
                    f"{options.directory / options.dataset}, whose files would be read as text; "
                    "choose a folder outside with --data-dir, or name the files and folders with "
                    "the text"
                )


def _document_options(options: PrepareOptions) -> DocumentOptions:
    keys = (options.text_key,)
    return DocumentOptions(keys=keys, ftfy=options.ftfy, skip_bad=options.skip_bad)


def _has_source(options: PrepareOptions) -> bool:
    return bool(options.sources or options.urls or options.hub_name)


def _urls(options: PrepareOptions) -> tuple[str, ...]:
    """The files to download: the given URLs, or the dataset's own if there is no source at all."""
    known = KNOWN_DATASETS.get(options.dataset)
    if _has_source(options) or known is None or known.url is None:
        return options.urls
    return (known.url,)


def _given_tokenizer(options: PrepareOptions) -> TokenizerFiles:
    """The tokenizer that the options name. Downloads GPT-2's files if none are given."""
    tokenizer_type = options.tokenizer_type or "GPT2BPETokenizer"
    files = [options.vocab_file, options.merge_file]
    if tokenizer_type == "GPT2BPETokenizer" and files == [None, None]:
        try:
            files = [str(download(url, options.directory)) for url in GPT2_FILES]
        except UserError as error:
            raise UserError(
                f"{error} (to use local files, set --vocab-file and --merge-file)"
            ) from error
    return TokenizerFiles(tokenizer_type, *files)


def _open_source(options: PrepareOptions, urls: tuple[str, ...]) -> ChunkSource:
    columns = (options.text_key, "meta")
    if options.dataset == EMBEDDED:
        return StdlibCorpus()
    if options.hub_name is not None:
        return HubCorpus(options.hub_name, options.hub_config, options.hub_split, columns)
    if len(set(map(file_name, urls))) < len(urls):
        raise UserError(
            "two of the URLs have the same file name; download these files separately and pass "
            "--from"
        )

    # Download, and name other sources if that fails.
    folder = options.directory / options.dataset / "downloads"
    try:
        downloads = [download(url, folder) for url in urls]
    except UserError as error:
        if urls == options.urls or options.dataset not in KNOWN_DATASETS:
            raise
        sources = KNOWN_DATASETS[options.dataset].sources
        raise UserError(
            f"{error}. To name another source, pass {_SOURCE_OPTIONS}. Known: {sources}"
        ) from error
    found = find_files([*options.sources, *downloads], options.suffixes)
    files = FileCorpus(found, options.suffixes, columns)
    if options.dataset in KNOWN_DATASETS:
        return files
    return OwnText(files, _document_options(options), options.limit_mb)


def _rebuild_reason(
    recipe: dict[str, object], prefix: Path, tokenizer_files: TokenizerFiles, skip_bad: bool
) -> str | None:
    """Return how the dataset differs from the recipe, an empty string if it does not exist, or None
    if it is up to date.
    """
    # The recipe is written last, so without one there is no complete dataset.
    try:
        present = json.loads(read_file(prefix.parent / _RECIPE))
    except (UserError, ValueError, RecursionError):
        return ""
    if not isinstance(present, dict):
        return ""
    labels = {
        "trained_vocab_size": "--vocab-size",
        "tokenizer_fingerprint": "tokenizer file",
        "skip_bad": "--bad-documents",
        "hidden_files": "rule for hidden files",
    }
    try:
        manifest = open_indexed_files(prefix).manifest
        if manifest is None:
            return _FILES_CHANGED
        changed = []
        for key in sorted({*recipe, *present}):
            if present.get(key) != recipe.get(key):
                changed.append(labels.get(key, key))
        if changed:
            return f"{', '.join(changed)} changed"
        if manifest.skipped_bad and not skip_bad:
            return "--bad-documents changed"
        if tokenizer_files.build().fingerprint != manifest.tokenizer_fingerprint:
            return _FILES_CHANGED
    except UserError:
        return _FILES_CHANGED
    return None
