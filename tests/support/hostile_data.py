"""Hostile data: inputs of preprocess_data.py, `.bin`/`.idx` files and their manifests, and servers of downloads.

Each function makes a `Case` in an empty folder. It starts from valid files and changes them at random.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from megatron.data.indexed_dataset import HEADER
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.preparation.input_files import find_files
from megatron.preparation.preprocessing import preprocess
from megatron.preparation.readers import FileCorpus
from tests.soak.cases import SECONDS, Case, replace_constants
from tests.support.checkpoints import settings_of
from tests.support.corpora import BYTE_TOKENIZER, json_lines
from tests.support.forks import start_run
from tests.support.hostile_results import change_value
from tests.support.runs import environment
from tests.support.servers import serve_bytes
from tests.support.texts import KINDS, PYTHON

HUGE = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1)
BOMB_BYTES = 700 << 20
NAMES = (
    "../escaped", "/tmp/escaped", "a\0b", "", ".", "..", "x" * 300, "a\nb", "\x1b[2J", "a b", "é", "-rf", "~", "{}",
    "%00",
)  # fmt: skip


def damage(generator: random.Random, content: bytes) -> bytes:
    """The content with bits flipped, or with a part cut off, removed, repeated, zeroed or replaced."""
    if not content:
        return generator.randbytes(generator.choice((1, 20, 1000)))
    start = generator.randrange(len(content))
    end = min(len(content), start + generator.choice((1, 2, 8, 512, 5000)))
    how = generator.randrange(7)
    if how == 0:
        changed = bytearray(content)
        for _ in range(generator.choice((1, 1, 3, 50))):
            changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
        return bytes(changed)
    middle = (
        b"",
        content[start:end] * 3,
        bytes(end - start),
        generator.randbytes(end - start),
        b"\xff" * (end - start),
    )
    return content[:start] if how == 1 else content[:start] + middle[how - 2] + content[end:]


def replace_by_special_file(generator: random.Random, path: Path) -> str:
    """Replace a file by something that is not a regular file, or not readable."""
    path.unlink()
    kind = generator.choice(("missing", "fifo", "folder", "zero", "dangling", "loop", "empty"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind != "missing":
        path.symlink_to({"zero": "/dev/zero", "dangling": "nowhere", "loop": path.name}[kind])
    return kind


# -- input files -------------------------------------------------------------------------------------------------------

LINES = (
    b"[]", b"1", b"null", b'"text"', b"{}", b'{"text": null}', b'{"text": 1}', b'{"text": ["a", "b"]}',
    b'{"text": {"a": 1}}', b'{"text": "\\ud800"}', b'{"text": "\\u0000\\u001b[31m"}', b'{"text": "a", "text": "b"}',
    b'{"text": "a"', b"{'text': 'a'}", b'{"text": "\xff\xfe"}', b'\xef\xbb\xbf{"text": "a"}', b"[" * 100_000,
    b'{"a":' * 100_000, b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}", b'{"text": NaN}', b"\0" * 100, b"",
    b" " * 1000, b"\r", b'{"text": "a"}\r', b'{"text": ""}', b'{"text": "a", "meta": 3}',
    b'{"text": "a", "meta": {"pile_set_name": []}}', b'{"text": "' + b"x" * 300_000 + b'"}',
)  # fmt: skip


def _lines(generator: random.Random) -> bytes:
    lines = [json_lines(text) for text in KINDS.values()] * 3
    for _ in range(generator.choice((1, 1, 3))):
        lines.insert(generator.randrange(len(lines) + 1), generator.choice(LINES) + b"\n")
    return b"".join(lines)


def _json_list(generator: random.Random) -> bytes:
    documents: list[object] = [{"text": text} for text in KINDS.values()]
    content = json.dumps(change_value(generator, documents)).encode()
    return generator.choice((content, b"\xef\xbb\xbf" + content, content + b"[]", b"[" + content, content[:-1]))


def _dat(generator: random.Random) -> bytes:
    records = [b"%016d" % len(text.encode()) + text.encode() for text in KINDS.values()]
    length = generator.choice(
        (b"9" * 16, b"0" * 16, b"-000000000000001", b"00000000000000_1", b"\xd9\xa1" * 8, b" " * 16)
    )
    records.insert(generator.randrange(len(records) + 1), generator.choice((length, length[:5], length + b"text")))
    return b"".join(records)


def _parquet(generator: random.Random) -> bytes:
    values = generator.choice((
        {"text": ["a", None, "b"]}, {"text": [1, 2]}, {"text": [b"\xff"]}, {"text": [["a"]]}, {"other": ["a"]},
        {"text": ["x" * 100_000] * 50}, {"text": [{"a": 1}]}, {"text": ["a"], "meta": [3]}, {"": ["a"], "text": ["b"]},
        {"text": []},
    ))  # fmt: skip
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(values), stream)
    content = stream.getvalue()
    return damage(generator, content) if generator.random() < 0.6 else content


@functools.cache
def _bomb() -> bytes:
    """`BOMB_BYTES` zeros without a line end, as gzip."""
    block = gzip.compress(bytes(BOMB_BYTES // 100), 9)
    return block * 100  # several members are one stream


def _tar(generator: random.Random) -> bytes:
    stream = io.BytesIO()
    kind = generator.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for number in range(generator.choice((1, 3, 2000))):
            _add(archive, f"folder/{number}.jsonl", json_lines("text"))
        for _ in range(generator.choice((1, 2))):
            _add_hostile_member(generator, archive)
    content = stream.getvalue()
    how = generator.randrange(5)
    if how == 0:  # a header whose size is far beyond the end of the file
        info = tarfile.TarInfo("long")
        info.type = generator.choice((b"x", b"g", b"L", b"K", b"S", b"0"))
        info.size = generator.choice((2**20, 2**33, 2**60))
        content = info.tobuf(tarfile.GNU_FORMAT) + generator.choice((b"", b"x" * 1024, content))
    return damage(generator, content) if how == 1 else content


def _add(archive: tarfile.TarFile, name: str, content: bytes, **attributes: object) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    archive.addfile(info, io.BytesIO(content))


def _add_hostile_member(generator: random.Random, archive: tarfile.TarFile) -> None:
    how = generator.randrange(6)
    if how == 0:
        with contextlib.suppress(ValueError):  # ustar cannot store the name
            _add(archive, generator.choice(NAMES) + generator.choice(("", ".jsonl", ".txt")), json_lines("text"))
    elif how == 1:
        types = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"Z")
        _add(
            archive,
            "link.jsonl",
            b"",
            type=generator.choice(types),
            linkname=generator.choice(("/etc/passwd", "link.jsonl")),
        )
    elif how == 2:
        _add(archive, "bomb.txt.gz", _bomb())
    elif how == 3:
        pax = {"size": "99999999999", "path": "x" * 100_000, "GNU.sparse.realsize": "9" * 30, "GNU.sparse.map": "0,9,"}
        name = generator.choice(list(pax))
        _add(archive, "pax.jsonl", json_lines("text"), pax_headers={name: pax[name]})
    elif how == 4:
        _add(
            archive,
            generator.choice(("nested.tar", "nested.zip", "nested.parquet", "a.json")),
            generator.randbytes(3000),
        )
    else:
        _add(archive, "lines.jsonl", _lines(generator))


def _zip(generator: random.Random) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(generator.choice((1, 3, 500))):
            archive.writestr(f"{number}.jsonl", json_lines("text"))
        archive.writestr(generator.choice(NAMES) + ".jsonl", _lines(generator))
        if generator.random() < 0.2:
            archive.writestr("bomb.txt.gz", _bomb())
        if generator.random() < 0.2:
            archive.writestr("nested.zip", generator.randbytes(2000))
    content = bytearray(stream.getvalue())
    how = generator.randrange(3)
    if how == 0:  # a field of the central directory: flags, method, checksum, sizes, offset
        start = content.rfind(b"PK\x01\x02")
        offset, size = generator.choice(((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (42, 4)))
        content[start + offset : start + offset + size] = generator.randbytes(size)
    return damage(generator, bytes(content)) if how == 1 else bytes(content)


def _zstd_header(generator: random.Random) -> bytes:
    """A frame that announces a large window or content."""
    descriptor, window = generator.choice(((0x00, 0xFF), (0xC0, 0xA8), (0xE0, None), (0x00, 0xA8), (0x03, 0x58)))
    header = b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + (b"" if window is None else bytes([window]))
    return header + generator.choice((b"", b"\xff" * 8)) + generator.randbytes(generator.choice((0, 3, 100)))


FORMATS: dict[str, Callable[[random.Random], bytes]] = {
    ".jsonl": _lines, ".json": _json_list, ".txt": lambda generator: generator.randbytes(5000), ".dat": _dat,
    ".parquet": _parquet, ".tar": _tar, ".zip": _zip,
}  # fmt: skip
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress,
    ".zst": lambda content: zstandard.ZstdCompressor().compress(content), ".bz2": bz2.compress,
}  # fmt: skip


def hostile_input(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A file of any format and compression, for preprocess_data.py or count_subsets.py."""
    suffix, compression = generator.choice(list(FORMATS)), generator.choice(["", "", *COMPRESSIONS])
    content = COMPRESSIONS[compression](FORMATS[suffix](generator))
    how = generator.choices(("valid", "damaged", "bomb", "header", "special"), (60, 25, 5, 5, 5))[0]
    name = generator.choice(("input", "input", "input", "in put\x1b[31m", "é\udcff"))
    if how == "damaged":
        content = damage(generator, content)
    elif how == "bomb":
        suffix, compression, content = generator.choice((".txt", ".jsonl", ".tar", ".dat", ".json")), ".gz", _bomb()
    elif how == "header":
        compression, content = ".zst", _zstd_header(generator)
    path = Path(os.fsdecode(os.fsencode(folder / f"{name}{suffix}{compression}")))
    path.write_bytes(content)
    special = replace_by_special_file(generator, path) if how == "special" else ""
    command = ["tools/datasets/preprocess_data.py", "--input", generator.choice((str(path), str(folder)))]
    command += ["--output-prefix", str(folder / "out"), "--tokenizer-type", "CharLevelTokenizer", "--append-eod"]
    command += generator.choice(([], ["--bad-documents", "skip"], ["--pile-subset", "Github"], ["--suffixes", suffix]))
    return Case(f"{suffix}{compression}, {len(content):,} bytes, {how} {special}", command)


# -- datasets ----------------------------------------------------------------------------------------------------------


def hostile_dataset(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A `.bin`, an `.idx` or a manifest, for training and the dataset tools."""
    source = folder / "source.jsonl"
    source.write_bytes(json_lines(*(PYTHON[start : start + 200] for start in range(0, 8000, 200))))
    with contextlib.redirect_stderr(io.StringIO()):
        preprocess(FileCorpus(find_files([source])), folder / "data", BYTE_TOKENIZER, DocumentOptions(append_eod=True))
    prefix = folder / "data_text_document"
    suffix = generator.choice((".idx", ".idx", ".idx", ".bin", ".json"))
    path = prefix.with_name(prefix.name + suffix)
    how = generator.choices(("structure", "bytes", "special"), (55, 35, 10))[0]
    if how == "special":
        how = replace_by_special_file(generator, path)
    elif how == "bytes" or suffix == ".bin":
        path.write_bytes(damage(generator, path.read_bytes()))
    elif suffix == ".json":
        path.write_text(json.dumps(change_value(generator, json.loads(path.read_text()))))
    else:
        path.write_bytes(_change_index(generator, path.read_bytes()))
    return Case(f"{suffix}: {how}", _dataset_command(generator, folder, str(prefix)))


def _change_index(generator: random.Random, content: bytes) -> bytes:
    """The index with a wrong field in its header, or a wrong entry of one of its three arrays."""
    header, changed = list(HEADER.unpack_from(content)), bytearray(content)
    sequences = header[3]
    if generator.random() < 0.5:
        field = generator.randrange(1, 5)
        header[field] = generator.randrange(256) if field == 2 else generator.choice((*HUGE, header[field] + 1))
        changed[: HEADER.size] = HEADER.pack(*header)
        return bytes(changed)
    lengths, offsets = HEADER.size, HEADER.size + 4 * sequences
    start, code, count = generator.choice(
        ((lengths, "<i", sequences), (offsets, "<q", sequences), (offsets + 8 * sequences, "<q", sequences + 1))
    )
    value = generator.choice((-1, 0, 1, 2**31 - 1, -(2**31), *((2**62, -(2**63), 2**63 - 1) if code == "<q" else ())))
    entries = range(count) if generator.random() < 0.2 else [generator.randrange(count)]
    for entry in entries:
        struct.pack_into(code, changed, start + entry * struct.calcsize(code), value)
    return bytes(changed)


def _dataset_command(generator: random.Random, folder: Path, prefix: str) -> list[str]:
    output = str(folder / "out")
    config = folder / "config.yml"
    settings = settings_of("kerple_log", prefix, train_iters=1, save=None, eval_iters=0, log_interval=1)
    config.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return generator.choice((
        ["train.py", str(config)],
        ["tools/datasets/inspect_dataset.py", prefix],
        ["tools/datasets/inspect_dataset.py", prefix, "--sample", "0", "3", "--tokenizer-type", "CharLevelTokenizer"],
        ["tools/datasets/merge_datasets.py", "--input", prefix, prefix, "--output-prefix", output],
        ["tools/datasets/split_dataset.py", "--input", prefix, "--output-prefix", output],
    ))  # fmt: skip


def hostile_journal(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """The journal and the partial files of an interrupted preprocess_data.py, which then resumes.

    If it succeeds, the dataset must be that of an uninterrupted run.
    """
    source = folder / "source.jsonl"
    source.write_bytes(json_lines(*(PYTHON[start : start + 300] for start in range(0, 12_000, 300))))
    words = ["tools/datasets/preprocess_data.py", "--input", str(source), "--append-eod"]
    words += ["--tokenizer-type", "CharLevelTokenizer", "--output-prefix"]
    expected = _preprocess_partly(words, folder / "expected", None)
    _preprocess_partly(words, folder / "out", generator.randrange(1, 8))
    path = generator.choice([folder / "out.progress.json"] * 4 + sorted(folder.glob("out*partial*")))
    content = path.read_bytes()
    how = generator.choices(("values", "bytes", "special"), (60, 30, 10))[0]
    if how == "special":
        how = replace_by_special_file(generator, path)
    elif how == "values" and path.suffix == ".json":
        checksum, _, text = content.partition(b"\n")
        path.write_bytes(checksum + b"\n" + json.dumps(change_value(generator, json.loads(text))).encode())
    else:
        path.write_bytes(damage(generator, content))

    def problem(status: int, output: str) -> str | None:
        names = ("_text_document.bin", "_text_document.idx")
        written = [(folder / f"out{name}").read_bytes() for name in names] if status == 0 else expected
        return None if written == expected else "the dataset differs from that of an uninterrupted run"

    return Case(f"{path.name}: {how}", [*words, str(folder / "out")], constants=_SMALL_WORK_ITEMS, problem=problem)


_SMALL_WORK_ITEMS = {
    "megatron.preparation.preprocessing:COMMIT_INTERVAL_SECONDS": 0.0,
    "megatron.preparation.readers:BLOCK": 600,
    "megatron.preparation.encoding:WORK_ITEM_BYTES": 1200,
}


def _preprocess_partly(words: list[str], prefix: Path, items: int | None) -> list[bytes]:
    """Run preprocess_data.py in a fork, and end it without warning after a number of work items; None: at the end.
    Returns the contents of the finished dataset.
    """

    def prepare() -> None:
        replace_constants(_SMALL_WORK_ITEMS)
        add, left = IndexedWriter.add, iter(range(items or 10**9))

        def add_or_die(*arguments: Any) -> None:
            if next(left, None) is None:
                os._exit(9)
            add(*arguments)

        IndexedWriter.add = add_or_die  # type: ignore[method-assign]

    run = start_run(
        [*words, str(prefix)], prefix.with_suffix(".log"), cwd=prefix.parent, environment=environment(), prepare=prepare
    )
    run.wait(SECONDS)
    return [
        path.read_bytes() for path in sorted(prefix.parent.glob(f"{prefix.name}_*")) if path.suffix in (".bin", ".idx")
    ]


# -- downloads ---------------------------------------------------------------------------------------------------------

BODY = b"A text to download. " * 500
HEADERS = (
    b"Content-Length: %d" % len(BODY), b"Content-Length: -5", b"Content-Length: 99999999999999999999",
    b"Content-Length: abc", b"Content-Length: 10", b"Content-Length: 20000\r\nContent-Length: 5",
    b"Content-Range: bytes 0-9/10", b"Content-Range: x", b"Content-Range: bytes 5-99999/*",
    b"Content-Range: bytes 99999999999999999999-1/0", b'ETag: "a"', b'ETag: W/"a"', b"ETag: \x1b[31m",
    b"Last-Modified: never", b"Last-Modified: Sun, 06 Nov 1994 08:49:37 GMT", b"Content-Encoding: gzip",
    b"Transfer-Encoding: chunked", b"Location: file:///etc/passwd", b"Location: http://127.0.0.1:1/",
    b"Location: /again", b"Location: ftp://[::1", b"Connection: x" * 9000, b"no colon", b": empty",
    b"Retry-After: 99999999", b"Retry-After: x",
)  # fmt: skip
STATUSES = (
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 206 Partial Content",
    b"HTTP/1.1 301 Moved", b"HTTP/1.1 302 Found", b"HTTP/1.1 404 \x1b[31mNot found", b"HTTP/1.1 416 Range",
    b"HTTP/1.1 429 Slow", b"HTTP/1.1 500 Broken", b"HTTP/1.1 999 ?", b"HTTP/1.1 abc", b"HTTP/9.9 200 OK", b"",
    b"garbage", b"HTTP/1.1 200 " + b"x" * 70_000, b"HTTP/1.1 204 None", b"\x16\x03\x01\x02", b"HTTP/1.1 100 Continue",
)  # fmt: skip
BODIES = (
    BODY,
    BODY,
    b"",
    BODY[:50],
    BODY * 3,
    b"5\r\nhello\r\n0\r\n\r\n",
    b"FFFFFFFFFFFFFFFFFF\r\nx",
    b"-5\r\nx",
    b"zz\r\n",
)
ADDRESSES = (
    "a.txt", "a.txt", "a.txt", "..%2f..%2fescaped.txt", "%00.txt", "%1b[31m.txt", "x" * 300 + ".txt",
    "a.txt#sha256=00", "", "é.txt", "a.txt?key=secret", "a.txt#sha256=" + "0" * 64, "a\tb.txt", "%ff.txt",
)  # fmt: skip


def _response(generator: random.Random) -> bytes | tuple[bytes, bytes, float]:
    headers = generator.sample(HEADERS, generator.randrange(4))
    body = generator.choice(BODIES)
    head = b"\r\n".join([generator.choice(STATUSES), *headers]) + b"\r\n\r\n"
    if generator.random() < 0.1:
        return damage(generator, head + body)
    return (head, body[:20], 0.01) if generator.random() < 0.1 else head + body


def hostile_download(generator: random.Random, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A server for prepare_data.py."""
    responses = [_response(generator) for _ in range(generator.choice((1, 2, 5)))]
    address, _ = resources.enter_context(serve_bytes(responses))
    name = generator.choice(ADDRESSES)
    command = ["prepare_data.py", "enwik8", "-d", str(folder / "data"), "-t", "CharLevelTokenizer", "--workers", "1"]
    shown = [response[:60] if isinstance(response, bytes) else response[0][:60] for response in responses]
    return Case(f"{name}: {shown}", [*command, "--url", f"{address}/{name}"])
