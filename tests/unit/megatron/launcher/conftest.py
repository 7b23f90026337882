"""Real runs of deepy.py with small scripts in a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
MODEL = '{"num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16, "pos-emb": "none"}'
VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)


class Workplace:
    """A folder with a configuration and scripts, in which deepy.py is started."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "model.yml").write_text(MODEL)

    def script(self, text: str, name: str = "script.py") -> None:
        (self.folder / name).write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + text)

    def start(self, *words: str, **environment: str) -> subprocess.Popen:
        """Start `python deepy.py WORDS ...`; its output is piped, as text."""
        clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        return subprocess.Popen(
            [sys.executable, str(ROOT / "deepy.py"), *words],
            cwd=self.folder,
            env={**clean, "DS_ACCELERATOR": "cpu", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, typed: str = "", **environment: str) -> tuple[int, str, str]:
        """Run to the end, with `typed` as standard input: (exit status, standard output, standard error)."""
        process = self.start(*words, **environment)
        output, errors = process.communicate(typed, timeout=120)
        return process.returncode, output, errors


@pytest.fixture
def workplace(tmp_path) -> Workplace:
    return Workplace(tmp_path)
