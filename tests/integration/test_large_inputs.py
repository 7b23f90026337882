"""preprocess_data.py on large inputs: memory, worker counts, resuming, a million documents, tars, a 300 MB line."""

import contextlib
import gzip
import io
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import zstandard

from megatron.data.indexed_dataset import open_indexed_files
from tests.support.runs import ROOT
from tests.support.texts import KINDS

pytestmark = pytest.mark.slow

MB = 10**6
TOKENIZER = ["--tokenizer-type", "CharLevelTokenizer", "--append-eod"]


def command(source, output, *options) -> list[str]:
    script = str(ROOT / "tools" / "datasets" / "preprocess_data.py")
    return [sys.executable, script, "--input", str(source), "--output-prefix", str(output), *TOKENIZER, *options]


def peak_memory(words, status=0) -> tuple[int, str]:
    """Run a command. Returns the largest memory, in bytes, of its process and its workers together, and its stderr."""
    peak = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
        reader.start()
        while process.poll() is None:
            try:
                main = psutil.Process(process.pid)
                peak = max(peak, sum(each.memory_full_info().pss for each in (main, *main.children(recursive=True))))
            except psutil.Error:
                pass
            time.sleep(0.05)
        reader.join()
    assert process.returncode == status, errors
    assert errors[0].startswith("input: 1 file")  # printed at once, also without a terminal
    print(f"{peak / MB:.0f} MB")
    return peak, errors[0]


def limit(path) -> int:
    return 2 * Path(path).stat().st_size + 500 * MB


def lines_of(size: int) -> bytes:
    """About `size` bytes of JSON lines, of documents of different kinds and lengths."""
    generator = random.Random(1)
    texts = [text * repetitions for text in KINDS.values() for repetitions in (1, 3)]
    block = b"".join(
        json.dumps({"text": generator.choice(texts)[: generator.randrange(20_000)]}).encode() + b"\n"
        for _ in range(500)
    )
    return block * (size // len(block) + 1)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    path.write_bytes(lines_of(200 * MB))
    return path


@pytest.fixture(scope="module")
def expected(large) -> dict[str, bytes]:
    peak, _ = peak_memory(command(large, large.parent / "one", "--workers", "1"))
    assert peak < limit(large), f"{peak / MB:.0f} MB"
    return contents(large.parent / "one")


def contents(prefix) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}_text_document.{ending}").read_bytes() for ending in ("bin", "idx")}


def test_four_workers(large, expected, tmp_path):
    """200 MB give the same bytes with 1 and 4 workers."""
    subprocess.run(command(large, tmp_path / "four", "--workers", "4"), check=True, capture_output=True)
    assert contents(tmp_path / "four") == expected


def test_resume_after_kills(large, expected, tmp_path):
    """200 MB, killed three times: each run resumes, and the result has the same bytes."""
    journal, resumed = tmp_path / "out.progress.json", 0
    for _ in range(3):
        with subprocess.Popen(
            command(large, tmp_path / "out"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as run:
            before = journal.read_bytes() if journal.exists() else b""
            while (journal.read_bytes() if journal.exists() else b"") == before:
                assert run.poll() is None
                time.sleep(0.05)
            os.kill(run.pid, signal.SIGKILL)
            resumed += b"resuming after" in run.stdout.read()
    last = subprocess.run(command(large, tmp_path / "out"), check=True, capture_output=True)
    assert b"resuming after" in last.stdout
    assert resumed == 2
    assert contents(tmp_path / "out") == expected


def test_a_line_of_300_megabytes(tmp_path):
    path = tmp_path / "long.jsonl"
    text = "the quick brown fox jumps over the lazy dog and " * (300 * MB // 48)
    path.write_text(json.dumps({"text": text}) + "\n")
    peak, _ = peak_memory(command(path, tmp_path / "out"))
    files = open_indexed_files(tmp_path / "out_text_document")
    assert (files.documents, files.tokens) == (1, len(text) + 1)
    tokens = files.open_tokens()
    assert bytes(tokens[-49:-1].astype(np.uint8)).decode() == text[:48]
    assert peak < limit(path), f"{peak / MB:.0f} MB"


def test_a_million_tiny_documents(tmp_path):
    path = tmp_path / "tiny.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(1_000_000)))
    peak, _ = peak_memory(command(path, tmp_path / "out"))
    files = open_indexed_files(tmp_path / "out_text_document")
    assert files.documents == 1_000_000
    assert bytes(files.open_tokens()[-7:].astype(np.uint8)) == b"999999\0"
    assert peak < limit(path), f"{peak / MB:.0f} MB"


def test_tar_of_many_files(tmp_path):
    """100,000 members, compressed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in range(100_000):
            header, content = tarfile.TarInfo(f"{number % 100}/{number}.txt"), b"%d" % number
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    path = tmp_path / "many.tar.gz"
    path.write_bytes(gzip.compress(buffer.getvalue(), 1))
    peak, _ = peak_memory(command(path, tmp_path / "out"))
    assert open_indexed_files(tmp_path / "out_text_document").documents == 100_000
    assert peak < limit(path), f"{peak / MB:.0f} MB"


@pytest.mark.parametrize("ending", ["txt.gz", "jsonl.zst", "txt.xz", "zip"])
def test_bombs(tmp_path, ending):
    """A compressed document of 400 MB: an error, in limited memory."""
    path = tmp_path / f"bomb.{ending}"
    with contextlib.ExitStack() as stack:
        if ending == "zip":
            archive = stack.enter_context(zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1))
            stream = stack.enter_context(archive.open("a.txt", "w"))
        else:
            opened = {"txt.gz": gzip.open, "txt.xz": lzma.open, "jsonl.zst": zstandard.open}[ending]
            stream = stack.enter_context(opened(path, "wb"))
        for _ in range(40):
            stream.write(b"a" * 10 * MB)
    peak, errors = peak_memory(command(path, tmp_path / "out"), status=2)
    assert "a document has more than 100 MiB, the limit in compressed files and archives" in errors
    assert peak < limit(path), f"{peak / MB:.0f} MB"
