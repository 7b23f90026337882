"""preprocess_data.py with worker processes: a kill and Ctrl-C. The soak test kills and resumes it repeatedly."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron.data.indexed_dataset import open_indexed_files
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = "tools/datasets/preprocess_data.py"


@pytest.mark.ci
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_interrupted_with_workers(tmp_path, signal_number, forked_scripts):
    """No file under the final name and no worker process remains, and the next run succeeds."""
    large = tmp_path / "large.jsonl"
    large.write_bytes((b'{"text": "' + b"x" * 4000 + b'"}\n') * 6000)
    command = [sys.executable, str(ROOT / SCRIPT), "--input", str(large), "--output-prefix", str(tmp_path / "out")]
    command += ["--tokenizer-type", "CharLevelTokenizer"]
    with subprocess.Popen([*command, "--workers", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        partial = tmp_path / "out_text_document.partial.bin"
        wait_for(lambda: partial.exists() and partial.stat().st_size)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=60)
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(("document.bin", "document.idx"))]
    if signal_number == signal.SIGINT:
        assert process.returncode == 130
        assert errors.endswith("\ninterrupted\n")
        assert [path.name for path in tmp_path.iterdir()] == ["large.jsonl"]
    else:
        assert process.returncode == -signal.SIGKILL
    large.write_text('{"text": "text"}\n')
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert open_indexed_files(tmp_path / "out_text_document").tokens == 4
