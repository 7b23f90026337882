"""preprocess_data.py on large inputs: memory, workers, a million documents, a tar of many files, a
line of 300 MB.
"""

import contextlib
import gzip
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron.data.indexed_dataset import IndexedFiles, open_indexed_files
from tests.support.archives import tar_of
from tests.support.runs import ROOT
from tests.support.texts import KINDS

pytestmark = pytest.mark.slow

MB = 10**6
SCRIPT = str(ROOT / "tools" / "datasets" / "preprocess_data.py")
TOKENIZER = ["--tokenizer-type", "CharLevelTokenizer", "--append-eod"]


def preprocessed(path: Path, prefix: Path, *options: str) -> IndexedFiles:
    """The dataset of a file. Its process and the workers may together need twice its size and 500
    MB.
    """
    words = [
        sys.executable,
        SCRIPT,
        "--input",
        str(path),
        "--output-prefix",
        str(prefix),
        *TOKENIZER,
        *options,
    ]
    peak = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                main = psutil.Process(process.pid)
                peak = max(
                    peak,
                    sum(
                        each.memory_full_info().pss
                        for each in (main, *main.children(recursive=True))
                    ),
                )
            time.sleep(0.05)
    assert process.returncode == 0
    assert peak < 2 * path.stat().st_size + 500 * MB, f"{peak / MB:.0f} MB"
    return open_indexed_files(f"{prefix}_text_document")


def test_one_and_four_workers(tmp_path):
    """200 MB of documents of different kinds and lengths."""
    generator = random.Random(1)
    texts = [
        text.replace("\0", "") * repetitions for text in KINDS.values() for repetitions in (1, 3)
    ]
    documents = [generator.choice(texts)[: generator.randrange(20_000)] for _ in range(500)]
    block = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    path = tmp_path / "large.jsonl"
    path.write_bytes(block * (200 * MB // len(block) + 1))
    preprocessed(path, tmp_path / "one", "--workers", "1")
    words = [
        sys.executable,
        SCRIPT,
        "--input",
        path,
        "--output-prefix",
        tmp_path / "four",
        *TOKENIZER,
    ]
    subprocess.run([*words, "--workers", "4"], check=True)
    for ending in ("bin", "idx"):
        one, four = (tmp_path / f"{name}_text_document.{ending}" for name in ("one", "four"))
        assert one.read_bytes() == four.read_bytes()


def test_a_line_of_300_megabytes(tmp_path):
    text = "the quick brown fox jumps over the lazy dog and " * (300 * MB // 48)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    files = preprocessed(tmp_path / "long.jsonl", tmp_path / "out")
    assert (files.documents, files.tokens) == (1, len(text) + 1)
    assert bytes(files.open_tokens()[-49:-1].astype(np.uint8)).decode() == text[:48]


def test_a_million_tiny_documents(tmp_path):
    (tmp_path / "tiny.jsonl").write_text(
        "".join(f'{{"text": "{number}"}}\n' for number in range(1_000_000))
    )
    files = preprocessed(tmp_path / "tiny.jsonl", tmp_path / "out")
    assert files.documents == 1_000_000
    assert bytes(files.open_tokens()[-7:].astype(np.uint8)) == b"999999\0"


def test_tar_of_many_files(tmp_path):
    """100,000 members, compressed."""
    content = tar_of({f"{number % 100}/{number}.txt": b"%d" % number for number in range(100_000)})
    (tmp_path / "many.tar.gz").write_bytes(gzip.compress(content, 1))
    assert preprocessed(tmp_path / "many.tar.gz", tmp_path / "out").documents == 100_000
