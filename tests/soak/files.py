"""Hostile datasets, inputs of preprocessing, journals, downloads and results: `GROUPS`, together with checkpoints.py.

Each function writes valid files to an empty folder and then changes one of them.
"""

import bz2
import contextlib
import functools
import gzip
import io
import json
import lzma
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard
from hypothesis import strategies as st

from megatron.checkpoint.directory import layer_file, weights_fingerprint
from megatron.data.indexed_dataset import HEADER
from megatron.preparation.documents import DocumentOptions
from megatron.preparation.indexed_writer import IndexedWriter
from megatron.preparation.input_files import find_files
from megatron.preparation.preprocessing import preprocess
from megatron.preparation.readers import FileCorpus
from megatron.sweep.definition import read_sweep
from megatron.sweep.planning import plan
from tests.soak import checkpoints
from tests.soak.cases import SECONDS, Case, Draw, MakeCase, pick
from tests.soak.changes import damage, flip, spoil, value_in
from tests.support.checkpoints import settings_of, write_checkpoint, write_corpus
from tests.support.corpora import BYTE_TOKENIZER, json_lines
from tests.support.forks import start_run
from tests.support.hostile import NAMES, page_problem, valid_records
from tests.support.servers import serve_bytes
from tests.support.sweeps import write_sweep
from tests.support.texts import KINDS, PYTHON

PREPROCESS = ["tools/datasets/preprocess_data.py", "--tokenizer-type", "CharLevelTokenizer", "--append-eod"]

# -- inputs of preprocessing -------------------------------------------------------------------------------------------

LINES = (
    b"[]", b"1", b"null", b'"text"', b"{}", b'{"text": null}', b'{"text": ["a", "b"]}', b'{"text": {"a": 1}}',
    b'{"text": "\\ud800"}', b'{"text": "\\u0000\\u001b[31m"}', b'{"text": "a", "text": "b"}', b'{"text": "a"',
    b"{'text': 'a'}", b'{"text": "\xff\xfe"}', b'\xef\xbb\xbf{"text": "a"}', b"[" * 100_000, b'{"a":' * 100_000,
    b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}", b'{"text": NaN}', b"\0" * 100, b"", b" " * 1000, b"\r",
    b'{"text": "a", "meta": {"pile_set_name": []}}', b'{"text": "' + b"x" * 300_000 + b'"}',
)  # fmt: skip
MEMBERS = (
    "../escaped.jsonl", "/tmp/escaped.txt", "", ".", "..", "x" * 300, "a\nb", "\x1b[2J", "é", "-rf", "nested.tar",
    "nested.zip", "a.parquet", "a.json",
)  # fmt: skip


def _lines(draw: Draw) -> bytes:
    lines = [json_lines(text) for text in KINDS.values()]
    return b"".join(draw(st.permutations([*lines, *(draw(st.sampled_from(LINES)) + b"\n" for _ in range(3))])))


def _json_list(draw: Draw) -> bytes:
    content = json.dumps(value_in(draw, [{"text": text} for text in KINDS.values()])).encode()
    return pick(draw, (content, b"\xef\xbb\xbf" + content, content + b"[]", b"[" + content, content[:-1]))


def _dat(draw: Draw) -> bytes:
    length = pick(draw, (b"9" * 16, b"0" * 16, b"-000000000000001", b"00000000000000_1", b"\xd9\xa1" * 8, b" " * 16))
    return b"".join(b"%016d" % len(text.encode()) + text.encode() for text in KINDS.values()) + length + b"text"


def _parquet(draw: Draw) -> bytes:
    values = ({"text": ["a", None, "b"]}, {"text": [1, 2]}, {"text": [b"\xff"]}, {"text": [["a"]]}, {"other": ["a"]},
              {"text": ["x" * 100_000] * 50}, {"text": [{"a": 1}]}, {"text": []})  # fmt: skip
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(pick(draw, values)), stream)
    return damage(draw, stream.getvalue()) if flip(draw) else stream.getvalue()


@functools.cache
def _bomb() -> bytes:
    """700 MB of zeros without a line end, as gzip of several members."""
    return gzip.compress(bytes(7 << 20), 9) * 100


def _tar(draw: Draw) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=pick(draw, (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as archive:
        for number in range(pick(draw, (1, 3, 2000))):
            checkpoints.add(archive, f"folder/{number}.jsonl", json_lines("text"))
        kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, b"Z")
        pax = {"size": "99999999999", "path": "x" * 100_000, "GNU.sparse.realsize": "9" * 30, "GNU.sparse.map": "0,9,"}
        key = pick(draw, pax)
        name, content, attributes = pick(
            draw,
            (
                (pick(draw, MEMBERS), json_lines("text"), {}),
                ("link.jsonl", b"", {"type": pick(draw, kinds), "linkname": pick(draw, ("/etc/passwd", "link.jsonl"))}),
                ("bomb.txt.gz", _bomb(), {}),
                ("pax.jsonl", json_lines("text"), {"pax_headers": {key: pax[key]}}),
                ("lines.jsonl", _lines(draw), {}),
            ),
        )
        checkpoints.add(archive, name, content, **attributes)
    return damage(draw, stream.getvalue()) if flip(draw) else stream.getvalue()


def _zip(draw: Draw) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(pick(draw, (1, 3, 500))):
            archive.writestr(f"{number}.jsonl", json_lines("text"))
        archive.writestr(*pick(draw, ((pick(draw, MEMBERS), _lines(draw)), ("bomb.txt.gz", _bomb()))))
    content = bytearray(stream.getvalue())
    if flip(draw):  # a field of the central directory: flags, method, checksum, sizes, offset
        place = content.rfind(b"PK\x01\x02") + pick(draw, (8, 10, 16, 20, 24, 42))
        content[place : place + 2] = draw(st.binary(min_size=2, max_size=2))
    return damage(draw, bytes(content)) if flip(draw) else bytes(content)


FORMATS: dict[str, Callable[[Draw], bytes]] = {
    ".jsonl": _lines, ".json": _json_list, ".txt": lambda draw: draw(st.binary(max_size=1000)), ".dat": _dat,
    ".parquet": _parquet, ".tar": _tar, ".zip": _zip,
}  # fmt: skip
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress,
    ".zst": zstandard.compress, ".bz2": bz2.compress,
}  # fmt: skip
# Frames of Zstandard that announce a large window or content.
FRAMES = (b"\x00\xff", b"\xc0\xa8", b"\xe0", b"\x00\xa8", b"\x03\x58")


def hostile_input(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A file of any format and compression, for preprocess_data.py."""
    suffix, compression = pick(draw, FORMATS), pick(draw, ["", "", *COMPRESSIONS])
    how = pick(draw, ("valid", "valid", "valid", "spoiled", "bomb", "frame"))
    if how == "bomb":
        suffix, compression, content = pick(draw, (".txt", ".jsonl", ".tar", ".dat", ".json")), ".gz", _bomb()
    elif how == "frame":
        compression, content = ".zst", b"\x28\xb5\x2f\xfd" + pick(draw, FRAMES) + draw(st.binary(max_size=100))
    else:
        content = COMPRESSIONS[compression](FORMATS[suffix](draw))
    name = pick(draw, ("input", "input", "input", "in put\x1b[31m", "é\udcff"))
    path = Path(os.fsdecode(os.fsencode(folder / f"{name}{suffix}{compression}")))
    path.write_bytes(content)
    if how == "spoiled":
        spoil(draw, path)
    command = [*PREPROCESS, "--input", pick(draw, (str(path), str(folder))), "--output-prefix", "out"]
    options = ([], ["--bad-documents", "skip"], ["--pile-subset", "Github"], ["--suffixes", suffix])
    return Case([*command, *pick(draw, options)])


# -- datasets and journals ---------------------------------------------------------------------------------------------


def hostile_dataset(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A `.bin`, an `.idx` or a manifest, for training and the dataset tools."""
    source, prefix = folder / "source.jsonl", str(folder / "data_text_document")
    source.write_bytes(json_lines(*(PYTHON[start : start + 200] for start in range(0, 8000, 200))))
    with contextlib.redirect_stderr(io.StringIO()):
        preprocess(FileCorpus(find_files([source])), folder / "data", BYTE_TOKENIZER, DocumentOptions(append_eod=True))
    path = Path(prefix + pick(draw, (".idx", ".idx", ".idx", ".bin", ".json")))
    if path.suffix == ".idx" and flip(draw):  # a wrong entry of the header or of one of the three arrays
        content = bytearray(path.read_bytes())
        start = pick(draw, (draw(st.integers(9, HEADER.size)), draw(st.integers(9, len(content) - 8))))
        code, limit = pick(draw, (("<i", 2**31), ("<q", 2**63)))
        struct.pack_into(code, content, start, pick(draw, (-1, 0, 1, limit - 1, -limit)))
        path.write_bytes(content)
    else:
        spoil(draw, path)
    settings = settings_of("kerple_log", prefix, train_iters=1, eval_iters=0)
    (folder / "config.yml").write_text(json.dumps(settings))
    inspect = ["tools/datasets/inspect_dataset.py", prefix]
    commands = (
        ["train.py", "config.yml"],
        inspect,
        [*inspect, "--sample", "0", "3", "--tokenizer-type", "CharLevelTokenizer"],
        ["tools/datasets/merge_datasets.py", "--input", prefix, "--output-prefix", "out"],
        ["tools/datasets/split_dataset.py", "--input", prefix, "--output-prefix", "out", "--split", "8,1,1"],
    )
    return Case(pick(draw, commands))


SMALL_WORK_ITEMS = {
    "megatron.preparation.preprocessing:COMMIT_INTERVAL_SECONDS": 0.0,
    "megatron.preparation.readers:BLOCK": 600,
    "megatron.preparation.encoding:WORK_ITEM_BYTES": 1200,
}


def hostile_journal(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """The journal and the partial files of an interrupted preprocess_data.py, which then resumes.

    If it succeeds, the dataset must be that of an uninterrupted run.
    """
    lines = json_lines(*(PYTHON[start : start + 300] for start in range(0, 12_000, 300)))
    (folder / "source.jsonl").write_bytes(lines)
    words = [*PREPROCESS, "--input", "source.jsonl", "--output-prefix"]
    expected = _preprocess(words, folder / "expected", 10**9)
    _preprocess(words, folder / "out", draw(st.integers(1, 7)))
    journal = folder / "out.progress.json"
    path = pick(draw, [journal] * 4 + sorted(set(folder.glob("out*partial*")) - set(folder.glob("*.lock"))))
    if path == journal and flip(draw):
        checksum, _, text = path.read_bytes().partition(b"\n")
        path.write_bytes(checksum + b"\n" + json.dumps(value_in(draw, json.loads(text))).encode())
    else:
        spoil(draw, path)

    def problem(status: int, output: str) -> str | None:
        written = _dataset(folder / "out") if status == 0 else expected
        return None if written == expected else "the dataset differs from that of an uninterrupted run"

    return Case([*words, "out"], constants=SMALL_WORK_ITEMS, problem=problem)


def _preprocess(words: list[str], prefix: Path, items: int) -> list[bytes]:
    """Run preprocess_data.py in a fork, and end it without warning after `items` work items; returns `_dataset`."""

    def prepare() -> None:
        add, left = IndexedWriter.add, iter(range(items))

        def add_or_die(*arguments: Any) -> None:
            if next(left, None) is None:
                os._exit(9)
            add(*arguments)

        IndexedWriter.add = add_or_die  # type: ignore[method-assign]

    log = prefix.with_suffix(".log")
    start_run([*words, prefix.name], log, constants=SMALL_WORK_ITEMS, prepare=prepare).wait(SECONDS)
    return _dataset(prefix)


def _dataset(prefix: Path) -> list[bytes]:
    paths = (prefix.with_name(f"{prefix.name}_text_document{suffix}") for suffix in (".bin", ".idx"))
    return [path.read_bytes() for path in paths if path.exists()]


# -- downloads ---------------------------------------------------------------------------------------------------------

BODY = b"A text to download. " * 500
HEADERS = (
    b"Content-Length: %d" % len(BODY), b"Content-Length: -5", b"Content-Length: 99999999999999999999",
    b"Content-Length: abc", b"Content-Length: 20000\r\nContent-Length: 5", b"Content-Range: bytes 0-9/10",
    b"Content-Range: bytes 99999999999999999999-1/0", b"ETag: \x1b[31m", b"Last-Modified: never",
    b"Content-Encoding: gzip", b"Transfer-Encoding: chunked", b"Location: file:///etc/passwd", b"Location: /again",
    b"Location: http://127.0.0.1:1/", b"Location: ftp://[::1", b"Connection: x" * 9000, b"no colon", b": empty",
    b"Retry-After: 99999999",
)  # fmt: skip
STATUSES = (
    b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK", b"HTTP/1.1 206 Partial Content", b"HTTP/1.1 302 Found",
    b"HTTP/1.1 404 \x1b[31mNot found", b"HTTP/1.1 416 Range", b"HTTP/1.1 429 Slow", b"HTTP/1.1 500 Broken",
    b"HTTP/1.1 999 ?", b"HTTP/9.9 200 OK", b"", b"garbage", b"HTTP/1.1 200 " + b"x" * 70_000, b"HTTP/1.1 204 None",
    b"\x16\x03\x01\x02", b"HTTP/1.1 100 Continue",
)  # fmt: skip
BODIES = (BODY, BODY, b"", BODY[:50], BODY * 3, b"5\r\nhello\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFFF\r\nx", b"-5\r\nx")
ADDRESSES = (
    "a.txt", "a.txt", "..%2f..%2fescaped.txt", "%00.txt", "%1b[31m.txt", "x" * 300 + ".txt", "a.txt#sha256=00", "",
    "é.txt", "a.txt?key=secret", "a.txt#sha256=" + "0" * 64, "a\tb.txt", "%ff.txt",
)  # fmt: skip


def _response(draw: Draw) -> bytes:
    headers, body = draw(st.lists(st.sampled_from(HEADERS), max_size=3, unique=True)), pick(draw, BODIES)
    head = b"\r\n".join([pick(draw, STATUSES), *headers]) + b"\r\n\r\n"
    return pick(draw, (head + body, head + body, damage(draw, head + body)))


def hostile_download(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """A server for prepare_data.py."""
    address = resources.enter_context(serve_bytes([_response(draw) for _ in range(pick(draw, (1, 2, 5)))]))
    command = ["prepare_data.py", "enwik8", "-d", "data", "-t", "CharLevelTokenizer", "--workers", "1"]
    return Case([*command, "--url", f"{address}/{pick(draw, ADDRESSES)}"])


# -- results -----------------------------------------------------------------------------------------------------------

CHOMSKY = {"steps": 1, "batch": 2, "train-longest": 4, "test-longest": 6, "test-samples": 2, "num-layers": 1}
CHOMSKY |= {"hidden-size": 16, "num-heads": 2}


def _write_lines(path: Path, *documents: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def hostile_result(draw: Draw, folder: Path, resources: contextlib.ExitStack) -> Case:
    """Results, names, benchmarks, Chomsky results, sweep metrics and journals, earlier evaluations, prompts, options,
    for the commands that read them.
    """
    kind = pick(draw, ("results", "results", "names", "benchmark", "chomsky", "metrics", "journal", "evaluation",
                       "prompts", "options"))  # fmt: skip
    out = folder / "out"
    short = [name for name in NAMES if len(name) < 300]
    report = ["tools/report.py", "--output", "out"]
    if kind in ("evaluation", "prompts", "options"):
        write_checkpoint(folder / "checkpoints", "kerple_log", write_corpus(folder))
    evaluate = ["evaluate.py", "--checkpoint", "checkpoints", "--lengths", "32", "--tokens", "128"]
    evaluate += ["--output", "out"]
    if kind == "results":
        path = _write_lines(folder / "in" / "results.jsonl", *valid_records())
        spoil(draw, path)
        command = [*report, str(path.parent)]
    elif kind == "names":
        records = valid_records()
        for entry in records:
            entry |= {key: pick(draw, short) for key in ("pos_emb", "corpus", "mode", "protocol", "note")}
            entry["checkpoint"] = {**entry["checkpoint"], "path": pick(draw, NAMES)}
        title = pick(draw, short)
        path = _write_lines(folder / (title.replace("/", "_").strip(". ")[:100] or "in") / "results.jsonl", *records)
        command = [*report, str(path.parent), f"--title={title}"]
    elif kind == "benchmark":
        rows = [{"name": name, "median": 0.5, "ratio": 1.2} for name in ("alibi", pick(draw, NAMES))]
        content = {"hardware": {"processor": pick(draw, NAMES)}, "tables": {pick(draw, NAMES): rows, "b": []}}
        path = _write_lines(folder / f"{pick(draw, NAMES).replace('/', '_')[:100]}.json", content)
        spoil(draw, path)
        command = [*report, "--benchmark", str(path)]
    elif kind == "chomsky":
        settings = {name.replace("-", "_"): value for name, value in CHOMSKY.items()}
        settings |= {"learning_rate": 1e-3, "test_every": 1, "architecture": "pre-norm"}
        result = {"task": "even_pairs", "seed": 0, "score": 0.375, "accuracies": {"5": 0.5, "6": 0.25}}
        results = [{**result, "pos_emb": name} for name in ("none", pick(draw, NAMES))]
        spoil(draw, _write_lines(folder / "chomsky.json", {"settings": settings, "results": results}))
        words = [word for name, value in CHOMSKY.items() for word in (f"--{name}", str(value))]
        command = ["tools/chomsky.py", "--tasks", "even_pairs", "--methods", "none", "--output", ".", *words]
    elif kind in ("metrics", "journal"):
        sweep = write_sweep(
            folder, axes={"pos_emb": ["alibi.yml"], "seed": [{"seed": 7}]}, evaluation={"lengths": [32]}
        )
        command, run = ["tools/sweep.py", str(sweep), "--dry-run"], out / "runs" / "alibi" / "7"
        lines = [{"iteration": n, "train/tokens": 256.0 * n, "train/tokens_per_second": 512.0} for n in range(1, 7)]
        path = _write_lines(run / "logs" / "metrics.jsonl", *lines)
        if kind == "journal":
            step = run / "checkpoints" / "global_step6"
            (step / "configs").mkdir(parents=True)
            (step / "configs" / "config.yml").write_bytes(plan(read_sweep(str(sweep)))[0].write_config().read_bytes())
            layer_file(step, 0, 0).write_text("weights")
            (run / "checkpoints" / "latest").write_text("global_step6")
            _write_lines(run / "evaluation" / "results.jsonl")
            journal = {"fingerprint": weights_fingerprint(step), "options": [["--lengths", "32"]]}
            path = _write_lines(run / "evaluation" / "evaluated.json", journal)
        spoil(draw, path)
    elif kind == "evaluation":
        spoil(draw, _write_lines(out / "results.jsonl", *valid_records()))
        command = [*evaluate, "--replace"]
    elif kind == "prompts":
        spoil(draw, _write_lines(folder / "prompts", *NAMES))
        numbers = st.sampled_from(("0", "-1", "1000000000000", "1e300", ".nan", "4"))
        words = [f"{pick(draw, ('maximum_tokens', 'num_samples', 'top_k', 'temperature', 'top_p'))}={draw(numbers)}"]
        command = ["generate.py", *evaluate[1:3], "-i", "prompts", "-o", "out.jsonl"]
        command += ["--set", *words, "maximum_tokens=4"]
    else:
        number = pick(draw, ("0", "-1", "10000000000", "1" + "0" * 5000, "1e3", "nan", "1000000000000", "x", ""))
        options = ("--by-position=", "--lengths=", "--tokens=", "--resolution=", "--passkey-trials=", "--query-chunk=",
                   "--batch-tokens=", "--passkey-depths=", "--protocol=kerple@", "--protocol=last-k@",
                   "--protocol=sliding@", "--modes=window@", "--modes=blockwise@")  # fmt: skip
        text = f"{pick(draw, ('--label', '--title', '--compare-with'))}={pick(draw, NAMES)}"
        command = [*evaluate, pick(draw, options) + number, text]

    def problem(status: int, output: str) -> str | None:
        page = out / "report.html"
        return page_problem(page.read_text()) if page.is_file() else None

    return Case(command, statuses=(0, 1, 2), problem=problem)


GROUPS: dict[str, MakeCase] = {
    "inputs of preprocessing": hostile_input,
    "datasets (.bin, .idx, manifest)": hostile_dataset,
    "journals of preprocessing": hostile_journal,
    "downloads": hostile_download,
    "results, metrics, journals, names": hostile_result,
    **checkpoints.GROUPS,
}
