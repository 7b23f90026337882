"""What is shown of a long pass: lines now and then in a log, a bar on a terminal."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from megatron.data import progress

ROOT = Path(__file__).parents[4]


def test_lines_in_a_log(capsys, monkeypatch):
    now = iter([0.0, 4.0, 20.0, 21.0, 40.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with progress.CorpusProgress("shards", 1000, total_documents=50, log_interval=10) as shown:
        shown.update(100, 10, 300, 2_000_000)  # 4 s: too early for a line
        shown.update(150, 15, 400, 3_000_000)  # too few documents since
        shown.update(400, 20, 700, 8_000_000)
        shown.update(500, 30, 900, 9_000_000)  # 1 s after the last line
        shown.update(800, 45, 1200, 16_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "shards: 40%, 20/50 documents, 700 tokens, 0.4 MB/s, 30 s left",
        "shards: 80%, 45/50 documents, 1,200 tokens, 0.4 MB/s, 10 s left",
    ]


def test_bar_on_a_terminal(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 500)
    command = [sys.executable, "tools/datasets/preprocess_data.py", "--input", str(tmp_path / "a.jsonl")]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "CharLevelTokenizer"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "150", "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while block := os.read(ours, 4096):
                shown += block
        except OSError:  # the other end was closed
            pass
        assert process.wait() == 0
    os.close(ours)
    assert b"100% 500 documents, 4,500 tokens," in shown
    assert b"MB/s" in shown
