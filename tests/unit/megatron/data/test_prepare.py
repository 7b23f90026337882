"""Preparing datasets by name: the embedded corpus, files that users bring, and doing nothing twice."""

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data import prepare as module
from megatron.data import stdlib_corpus
from megatron.data.indexed_format import check_indexed_files
from megatron.data.manifest import read_manifest
from megatron.data.prepare import DATASETS, PrepareOptions, prepare
from megatron.data.stdlib_corpus import StdlibCorpus
from megatron.tokenizer import build_tokenizer
from megatron.utils.errors import UserError

ROOT = Path(__file__).parents[4]


@pytest.fixture
def small_library(tmp_path, monkeypatch) -> Path:
    """A stand-in for the interpreter's library: real sources, few of them."""
    library = tmp_path / "library"
    real = StdlibCorpus().root
    for name in ("json/decoder.py", "json/__init__.py", "this.py", "fractions.py", "textwrap.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(real / name, library / name)
    for name in ("test/test_json.py", "json/tests/test_x.py", "site-packages/package.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("not part of the corpus")
    (library / "empty.py").touch()
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    return library


def stdlib(folder, **options) -> Path:
    return prepare(PrepareOptions("python_stdlib", folder, **{"vocab_size": 400, **options}))


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder, "python_stdlib").iterdir()}


def test_embedded_corpus(tmp_path, small_library):
    prefix = stdlib(tmp_path / "data")
    assert prefix == tmp_path / "data" / "python_stdlib" / "python_stdlib_text_document"
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    assert tokenizer.vocab_size == 400
    files = check_indexed_files(prefix)
    texts = [tokenizer.detokenize(ids) for ids in np.split(files.map_tokens(), files.offsets()[1:-1])]
    expected = {
        path.read_text("utf-8") for path in small_library.rglob("*.py") if path.name not in ("empty.py", "latin.py")
    }
    expected -= {"not part of the corpus"}
    assert len(texts) == len(expected) == 5
    assert {text.removesuffix("<|endoftext|>") for text in texts} == expected
    assert all(text.endswith("<|endoftext|>") for text in texts)
    assert read_manifest(prefix).skipped_empty == 1
    assert StdlibCorpus().skipped == 1


def test_the_same_wherever_the_library_is(tmp_path, small_library, monkeypatch):
    stdlib(tmp_path / "first")
    shutil.copytree(small_library, tmp_path / "elsewhere")
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "elsewhere")})
    stdlib(tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_done_once(tmp_path, small_library, capsys):
    stdlib(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "python_stdlib").iterdir()}
    assert len(before) == 5
    capsys.readouterr()
    stdlib(tmp_path)
    assert "up to date, used as it is" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "python_stdlib").iterdir()} == before
    stdlib(tmp_path, rebuild=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "python_stdlib").iterdir()} != before


def test_changes_are_noticed_and_named(tmp_path, small_library, capsys):
    stdlib(tmp_path)

    def again(expected, **options):
        capsys.readouterr()
        prefix = stdlib(tmp_path, **options)
        assert f"made again, because of another {expected}" in capsys.readouterr().out
        return build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json").vocab_size

    assert again("vocabulary size", vocab_size=500) == 500
    (small_library / "this.py").write_text("changed = True\n")
    again("corpus", vocab_size=500)
    shutil.copy(small_library / "this.py", tmp_path / "python_stdlib" / "python_stdlib_text_document.bin")
    again("state of its files", vocab_size=500)
    (tmp_path / "python_stdlib" / "tokenizer.json").unlink()
    again("state of its files", vocab_size=500)
    stdlib(tmp_path, vocab_size=500)
    assert "up to date" in capsys.readouterr().out


def test_interrupted_goes_on(tmp_path, small_library, monkeypatch):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "preprocess", stop)
    with pytest.raises(KeyboardInterrupt):
        stdlib(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(small_library)})
    assert check_indexed_files(stdlib(tmp_path)).documents == 5


def test_no_other_preparation_comes_in_between(tmp_path, small_library, monkeypatch, capsys):
    """One with another vocabulary, while the first is between its tokenizer and its tokens."""
    real = module.preprocess

    def meanwhile(*arguments, **more):
        with pytest.raises(UserError, match=r"another process is preparing .*_text_document; wait .* --data-dir"):
            stdlib(tmp_path, vocab_size=500)
        return real(*arguments, **more)

    monkeypatch.setattr(module, "preprocess", meanwhile)
    prefix = stdlib(tmp_path)
    monkeypatch.setattr(module, "preprocess", real)
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    assert tokenizer.vocab_size == read_manifest(prefix).vocab_size == 400
    assert tokenizer.fingerprint == read_manifest(prefix).tokenizer_fingerprint
    stdlib(tmp_path)
    assert "up to date" in capsys.readouterr().out


def test_given_tokenizer(tmp_path, small_library):
    prefix = stdlib(tmp_path, tokenizer_type="CharLevelTokenizer")
    assert not (prefix.parent / "tokenizer.json").exists()
    assert read_manifest(prefix).tokenizer == "CharLevelTokenizer"


def pile_shard(path, names=("Github", "ArXiv", "Github", "OpenWebText2")) -> Path:
    lines = [{"text": f"{name} {number}", "meta": {"pile_set_name": name}} for number, name in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def text_of(prefix) -> str:
    return bytes(check_indexed_files(prefix).map_tokens().astype(np.uint8)).decode()


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("github", "Github 0\0Github 2\0"),
        ("arxiv", "ArXiv 1\0"),
        ("openwebtext2", "OpenWebText2 3\0"),
        ("pile", "Github 0\0ArXiv 1\0Github 2\0OpenWebText2 3\0"),
    ],
)
def test_subsets_of_the_pile(tmp_path, dataset, expected):
    shard = pile_shard(tmp_path / "00.jsonl")
    prefix = prepare(PrepareOptions(dataset, tmp_path, "CharLevelTokenizer", sources=(str(shard),)))
    assert prefix == tmp_path / dataset / f"{dataset}_text_document"
    assert text_of(prefix) == expected


def test_enwik8(tmp_path):
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", "<mediawiki>")
    prefix = prepare(PrepareOptions("enwik8", tmp_path, "CharLevelTokenizer", sources=(str(tmp_path / "enwik8.zip"),)))
    assert text_of(prefix) == "<mediawiki>\0"


def test_changed_source(tmp_path, capsys):
    shard = pile_shard(tmp_path / "00.jsonl")
    options = PrepareOptions("github", tmp_path, "CharLevelTokenizer", sources=(str(shard),))
    prepare(options)
    pile_shard(shard, ("Github",))
    assert text_of(prepare(options)) == "Github 0\0"
    assert "because of another corpus" in capsys.readouterr().out


def test_no_skipping_after_skipping(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{broken\n')
    options = PrepareOptions("pile", tmp_path, "CharLevelTokenizer", sources=(str(tmp_path / "a.jsonl"),))
    prepare(replace(options, skip_bad=True))
    with pytest.raises(UserError, match=r"a.jsonl, line 2: not JSON"):
        prepare(options)
    assert "because of another answer to unreadable documents" in capsys.readouterr().out


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name != "python_stdlib"])
def test_without_a_source_the_ways_are_named(tmp_path, dataset):
    with pytest.raises(
        UserError, match=rf"{dataset} has no source: say .* --from .* --url .* --hf NAME .* to be had as: \w+"
    ):
        prepare(PrepareOptions(dataset, tmp_path, "CharLevelTokenizer"))
    assert list(tmp_path.iterdir()) == []


def test_errors(tmp_path):
    with pytest.raises(UserError, match="unknown dataset 'wikitext'; known: python_stdlib, openwebtext2"):
        prepare(PrepareOptions("wikitext", tmp_path))
    with pytest.raises(UserError, match="it takes no source"):
        prepare(PrepareOptions("python_stdlib", tmp_path, sources=("a.txt",)))
    shard = pile_shard(tmp_path / "00.jsonl")
    with pytest.raises(UserError, match="GPT2BPETokenizer needs vocab-file"):
        prepare(PrepareOptions("github", tmp_path, sources=(str(shard),)))


def test_interpreter_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="holds no Python sources"):
        stdlib(tmp_path / "data")


def test_the_real_library_through_the_command(tmp_path):
    command = [sys.executable, "prepare_data.py", "-d", str(tmp_path), "--workers", "2", "python_stdlib"]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    prefix = tmp_path / "python_stdlib" / "python_stdlib_text_document"
    manifest = read_manifest(prefix)
    assert manifest.vocab_size == 2048
    assert manifest.documents > 300
    assert manifest.tokens > 2_000_000
    assert 2.5 < manifest.text_bytes / manifest.tokens < 4
    assert f"{manifest.tokens:,} tokens" in first.stdout
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.stdout == f"{prefix}: up to date, used as it is\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["github"], "error: github has no source: say where it is to come from with --from"),
        (["wikitext"], "error: unknown dataset 'wikitext'"),
        (["-t", "SPMTokenizer", "--from", "prepare_data.py", "pile"], "error: "),
    ],
)
def test_command_errors(arguments, message):
    result = subprocess.run(
        [sys.executable, "prepare_data.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
