"""preprocess_data.py and prepare_data.py as processes: kills, Ctrl-C, worker processes, and
resuming.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron.data.indexed_dataset import open_indexed_files
from tests.support.corpora import dataset_text
from tests.support.processes import wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = "tools/datasets/preprocess_data.py"

# Runs preprocess_data.py with small work items, a short delay and a commit after each, and kills it
# several times, each time up to 0.03 s after a commit. The runs are forked, so that the modules are
# imported only once.
KILL_REPEATEDLY = """
import os, pathlib, random, runpy, signal, sys, time
sys.path.insert(0, ".")
from megatron.preparation import encoding, preprocessing, readers
from megatron.preparation.indexed_writer import IndexedWriter
preprocessing.COMMIT_INTERVAL_SECONDS = 0.0
readers.BLOCK, encoding.WORK_ITEM_BYTES = 2000, 4000
add = IndexedWriter.add
def add_slowly(*arguments):
    time.sleep(0.002)
    add(*arguments)
IndexedWriter.add = add_slowly
script, kills, journal = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
sys.argv = [script, *sys.argv[4:]]
generator = random.Random(20)
def read_journal():
    return journal.read_bytes() if journal.exists() else b""
for kill in range(kills):
    before = read_journal()
    child = os.fork()
    if child == 0:
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            os._exit(0)
    while read_journal() == before:
        time.sleep(0.001)
    time.sleep(generator.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run finished before it was killed"
    print(read_journal().decode(), flush=True)
IndexedWriter.add = add
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize("kills", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_repeated_kills(kills, tmp_path):
    """kill -9, again and again while one output is written: no document is lost or duplicated."""
    folder = tmp_path / "in"
    folder.mkdir()
    texts = [f"document {number} " * (number % 23 + 1) for number in range(3000)]
    lines = [
        json.dumps({"text": text, "title": f"title {number}"}) + "\n"
        for number, text in enumerate(texts)
    ]
    for shard in range(4):
        (folder / f"{shard}.jsonl").write_text("".join(lines[shard * 750 : (shard + 1) * 750]))
    output = tmp_path / "out"
    command = [sys.executable, "-c", KILL_REPEATEDLY, SCRIPT, str(kills), f"{output}.progress.json"]
    command += [
        "--input",
        str(folder),
        "--output-prefix",
        str(output),
        "--jsonl-keys",
        "text",
        "title",
    ]
    command += ["--append-eod", "--tokenizer-type", "CharLevelTokenizer"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    states = [
        json.loads(line)["progress"] for line in result.stdout.splitlines() if line.startswith("{")
    ]
    documents = [state["outputs"][0]["writer"]["documents"] for state in states]
    assert len(documents) == kills
    assert documents == sorted(documents)
    assert len(set(documents)) > kills / 2
    assert f"resuming after {documents[-1]:,} documents" in result.stdout
    assert dataset_text(f"{output}_text_document") == "".join(text + "\0" for text in texts)
    assert dataset_text(f"{output}_title_document") == "".join(
        f"title {number}\0" for number in range(len(texts))
    )
    assert not [
        path for path in tmp_path.iterdir() if "partial" in path.name or "progress" in path.name
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_interrupted_with_workers(tmp_path, signal_number, forked_scripts):
    """No file under the final name and no worker process remains, and the next run succeeds."""
    large = tmp_path / "large.jsonl"
    large.write_bytes((b'{"text": "' + b"x" * 4000 + b'"}\n') * 6000)
    command = [
        sys.executable,
        str(ROOT / SCRIPT),
        "--input",
        str(large),
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    command += ["--tokenizer-type", "CharLevelTokenizer"]
    with subprocess.Popen(
        [*command, "--workers", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as process:
        partial = tmp_path / "out_text_document.partial.bin"
        wait_for(lambda: partial.exists() and partial.stat().st_size)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal_number)
        _, errors = process.communicate(timeout=60)
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert not [
        path for path in tmp_path.iterdir() if path.name.endswith(("document.bin", "document.idx"))
    ]
    if signal_number == signal.SIGINT:
        assert process.returncode == 130
        assert errors.endswith("\ninterrupted\n")
        assert [path.name for path in tmp_path.iterdir()] == ["large.jsonl"]
    else:
        assert process.returncode == -signal.SIGKILL
    large.write_text('{"text": "text"}\n')
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert open_indexed_files(tmp_path / "out_text_document").tokens == 4
