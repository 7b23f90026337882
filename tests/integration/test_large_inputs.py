"""preprocess_data.py on large inputs: memory, worker counts, a million documents, tars, a 300 MB line."""

import gzip
import io
import json
import random
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.data.indexed_dataset import open_indexed_files
from tests.support.runs import ROOT
from tests.support.texts import KINDS

pytestmark = pytest.mark.slow

MB = 10**6
TOKENIZER = ["--tokenizer-type", "CharLevelTokenizer", "--append-eod"]


def command(source, output, *options) -> list[str]:
    script = str(ROOT / "tools" / "datasets" / "preprocess_data.py")
    return [sys.executable, script, "--input", str(source), "--output-prefix", str(output), *TOKENIZER, *options]


def peak_memory(words) -> int:
    """Run a command. Returns the largest memory, in bytes, of its process and its workers together."""
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
    assert process.returncode == 0, errors
    assert errors[0].startswith("input: 1 file")  # printed at once, also without a terminal
    print(f"{peak / MB:.0f} MB")
    return peak


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
    peak = peak_memory(command(large, large.parent / "one", "--workers", "1"))
    assert peak < limit(large), f"{peak / MB:.0f} MB"
    return contents(large.parent / "one")


def contents(prefix) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}_text_document.{ending}").read_bytes() for ending in ("bin", "idx")}


def test_four_workers(large, expected, tmp_path):
    """200 MB give the same bytes with 1 and 4 workers."""
    subprocess.run(command(large, tmp_path / "four", "--workers", "4"), check=True, capture_output=True)
    assert contents(tmp_path / "four") == expected


def test_a_line_of_300_megabytes(tmp_path):
    path = tmp_path / "long.jsonl"
    text = "the quick brown fox jumps over the lazy dog and " * (300 * MB // 48)
    path.write_text(json.dumps({"text": text}) + "\n")
    peak = peak_memory(command(path, tmp_path / "out"))
    files = open_indexed_files(tmp_path / "out_text_document")
    assert (files.documents, files.tokens) == (1, len(text) + 1)
    tokens = files.open_tokens()
    assert bytes(tokens[-49:-1].astype(np.uint8)).decode() == text[:48]
    assert peak < limit(path), f"{peak / MB:.0f} MB"


def test_a_million_tiny_documents(tmp_path):
    path = tmp_path / "tiny.jsonl"
    path.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(1_000_000)))
    peak = peak_memory(command(path, tmp_path / "out"))
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
    peak = peak_memory(command(path, tmp_path / "out"))
    assert open_indexed_files(tmp_path / "out_text_document").documents == 100_000
    assert peak < limit(path), f"{peak / MB:.0f} MB"
