"""prepare_data.py: a dataset by name, from its source to DIR/NAME/NAME_text_document.bin/.idx."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.data.chunks import ChunkSource
from megatron.data.documents import DocumentOptions
from megatron.data.download import download, shown
from megatron.data.hub import HubCorpus
from megatron.data.indexed_format import check_indexed_files
from megatron.data.input_files import find_files
from megatron.data.manifest import Manifest, read_manifest
from megatron.data.preprocessing import preprocess, summary
from megatron.data.readers import Corpus
from megatron.data.stdlib_corpus import StdlibCorpus
from megatron.data.workers import TokenizerFiles
from megatron.tokenizer.hugging_face import train_bpe
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically
from megatron.utils.locks import Lock

EMBEDDED = "python_stdlib"


@dataclass(frozen=True)
class KnownDataset:
    """A dataset that users bring as files.

    Attributes:
        subset: its meta.pile_set_name in shards of the Pile; None: everything.
        ways: where its files can be had.
    """

    subset: str | None
    ways: str


# What this project's own recipes and GPT-NeoX call the text of a document.
_TEXT = "text"

_ANY_WAY = (
    "--from FILE-OR-FOLDER (local, or s3:// and the like), --url ADDRESS[#sha256=...] to download, or --hf NAME to "
    "stream from the Hugging Face hub"
)
_PILE_SHARDS = "shards of the Pile (jsonl.zst with meta.pile_set_name, from which {subset} is picked)"
_GONE = "the Pile's own download hosts are gone"

KNOWN_DATASETS = {
    "openwebtext2": KnownDataset(
        "OpenWebText2",
        "segyges/OpenWebText2 on the Hugging Face hub has it as jsonl.zst.tar (--url with the file's address, or "
        "--from once you have it); or " + _PILE_SHARDS.format(subset="OpenWebText2"),
    ),
    "github": KnownDataset(
        "Github",
        f"{_PILE_SHARDS.format(subset='Github')}; {_GONE}; or any tree or tar of source files, e.g. a release of the "
        "Linux kernel with --suffixes .c,.h",
    ),
    "arxiv": KnownDataset("ArXiv", f"{_PILE_SHARDS.format(subset='ArXiv')}; {_GONE}"),
    "pile": KnownDataset(None, f"shards of the Pile (jsonl.zst), all subsets; {_GONE}"),
    "enwik8": KnownDataset(None, "enwik8 or enwik8.zip, which the Large Text Compression Benchmark offers"),
}
DATASETS = (EMBEDDED, *KNOWN_DATASETS)

# The steps of the preparation are all part of what a finished dataset was made by; raise this when they change.
_RECIPE_VERSION = 1


@dataclass(frozen=True)
class PrepareOptions:
    """What prepare_data.py was asked for.

    Attributes:
        dataset: one of DATASETS.
        directory: DIR; the result is DIR/NAME/NAME_text_document.
        tokenizer_type: None: for python_stdlib, train a BPE of `vocab_size` ids on it; otherwise GPT2BPETokenizer.
        sources: files and folders to read, local or remote; none for python_stdlib.
        urls: files to download (see `megatron.data.download`) and read.
        hub_name, hub_config, hub_split: a dataset of the Hugging Face hub, instead of the two above.
        text_key: name of the text in JSON objects, tables, and datasets of the hub.
        suffixes: read a tree of source files: those that end so, each one document.
    """

    dataset: str
    directory: Path = Path("data")
    tokenizer_type: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int = 2048
    sources: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    hub_name: str | None = None
    hub_config: str | None = None
    hub_split: str = "train"
    text_key: str = _TEXT
    suffixes: tuple[str, ...] = ()
    workers: int = 1
    ftfy: bool = False
    skip_bad: bool = False
    rebuild: bool = False


def prepare(options: PrepareOptions) -> Path:
    """Make the dataset unless it is there, made in the same way; return its prefix.

    Raises:
        UserError: an unknown dataset, no source for it, another process that is making it, and all that `preprocess`
            raises.
    """
    folder = options.directory / options.dataset
    prefix = folder / f"{options.dataset}_text_document"
    _check_source(options)
    train_tokenizer = options.dataset == EMBEDDED and options.tokenizer_type is None
    if train_tokenizer:
        files = TokenizerFiles("HFTokenizer", str(folder / "tokenizer.json"))
        how = {"trained_vocab_size": options.vocab_size}
    else:
        files = TokenizerFiles(options.tokenizer_type or "GPT2BPETokenizer", options.vocab_file, options.merge_file)
        tokenizer = files.build()
        how = {"tokenizer": tokenizer.name, "tokenizer_fingerprint": tokenizer.fingerprint}
    source = _open_source(options)
    recipe = {
        "version": _RECIPE_VERSION,
        "dataset": options.dataset,
        "ftfy": options.ftfy,
        "text_key": options.text_key,
        "corpus": source.identity(),
        **how,
    }
    changed = _differences(folder, prefix, recipe, files, options.skip_bad)
    if not changed and not options.rebuild:
        print(f"{prefix}: up to date, used as it is")
        return prefix
    # The tokenizer, the tokens and the recipe belong together: no other preparation may come between them.
    refusal = f"another process is preparing {prefix}; wait for it, or choose another folder with --data-dir"
    with Lock(folder / "prepare.lock", refusal):
        if changed and changed != [_ABSENT]:
            print(f"{prefix}: made again, because of another {', '.join(changed)}")
        _recipe_path(folder).unlink(missing_ok=True)
        if train_tokenizer:
            _train_tokenizer(source, options.vocab_size, folder / "tokenizer.json")
        manifest = _tokenize(source, folder, files, options)
        write_atomically(_recipe_path(folder), (json.dumps(recipe, indent=2) + "\n").encode())
    print(summary(prefix, manifest))
    return prefix


def _tokenize(source: ChunkSource, folder: Path, files: TokenizerFiles, options: PrepareOptions) -> Manifest:
    known = KNOWN_DATASETS.get(options.dataset)
    manifests = preprocess(
        source,
        folder / options.dataset,
        files,
        DocumentOptions(
            keys=(options.text_key,),
            subset=known.subset if known else None,
            append_eod=True,
            ftfy=options.ftfy,
            skip_bad=options.skip_bad,
        ),
        inputs=_inputs(options),
        names=(_TEXT,),
        workers=options.workers,
    )
    return manifests[options.text_key]


def default_workers() -> int:
    """As many as the processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_source(options: PrepareOptions) -> None:
    """Refuse what has no source, or several kinds of them, before anything is downloaded or built."""
    given = options.sources or options.urls or options.hub_name
    if options.dataset == EMBEDDED:
        if given or options.suffixes:
            raise UserError(f"{EMBEDDED} is made from the running interpreter's library; it takes no source")
        return
    known = KNOWN_DATASETS.get(options.dataset)
    if known is None:
        raise UserError(f"unknown dataset {options.dataset!r}; known: {', '.join(DATASETS)}")
    if not given:
        raise UserError(
            f"{options.dataset} has no source: say where it is to come from with {_ANY_WAY}. It is to be had as: "
            f"{known.ways}. To prepare any other text, use tools/datasets/preprocess_data.py"
        )
    if options.hub_name is not None and (options.sources or options.urls or options.suffixes):
        raise UserError("--hf is a source of its own: give it without --from, --url and --suffixes")


def _open_source(options: PrepareOptions) -> ChunkSource:
    columns = (options.text_key, "meta")
    if options.dataset == EMBEDDED:
        return StdlibCorpus()
    if options.hub_name is not None:
        return HubCorpus(options.hub_name, options.hub_config, options.hub_split, columns)
    files = find_files([*options.sources, *_downloads(options)], options.suffixes)
    return Corpus(files, options.suffixes, columns)


def _downloads(options: PrepareOptions) -> list[Path]:
    folder = options.directory / options.dataset / "downloads"
    paths = [download(url, folder) for url in options.urls]
    if len(set(paths)) < len(paths):
        raise UserError("two of the files to download have one name; download them one after the other by hand")
    return paths


def _inputs(options: PrepareOptions) -> list[str]:
    """Names of what is read, for the manifest."""
    hub = [f"hf:{options.hub_name}"] if options.hub_name else []
    return [*options.sources, *(shown(url) for url in options.urls), *hub] or [EMBEDDED]


def _train_tokenizer(source: StdlibCorpus, vocab_size: int, path: Path) -> None:
    print(f"training a BPE tokenizer of {vocab_size} ids on {len(source.documents):,} files of {source.root}")
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = train_bpe(source.texts(), vocab_size, progress=sys.stderr.isatty())
    write_atomically(path, tokenizer.to_str(pretty=True).encode())


_ABSENT = "absent"


def _recipe_path(folder: Path) -> Path:
    return folder / "prepare.json"


def _differences(folder: Path, prefix: Path, recipe: dict, files: TokenizerFiles, skip_bad: bool) -> list[str]:
    """In what the dataset that is there differs from the one asked for; [_ABSENT] if there is none."""
    try:
        present = json.loads(_recipe_path(folder).read_bytes())
    except (OSError, ValueError):
        return [_ABSENT]
    names = {"trained_vocab_size": "vocabulary size", "tokenizer_fingerprint": "tokenizer file"}
    changed = [names.get(key, key) for key in sorted({*recipe, *present}) if present.get(key) != recipe.get(key)]
    if changed:
        return changed
    try:
        found, manifest = check_indexed_files(prefix), read_manifest(prefix)
        whole = manifest is not None and (manifest.tokens, manifest.documents) == (found.tokens, found.documents)
        if whole and manifest.skipped_bad and not skip_bad:
            return ["answer to unreadable documents"]
        if not whole or files.build().fingerprint != manifest.tokenizer_fingerprint:
            return ["state of its files"]
    except UserError:
        return ["state of its files"]
    return []
