"""generate.py as a script, with prompts from a pipe; it needs neither DeepSpeed nor a process group."""

import subprocess
import sys

from tests.support.checkpoints import settings_of, write_checkpoint, write_yaml
from tests.support.runs import ROOT, environment

CHECK = """
import atexit, sys

@atexit.register
def report():
    import torch
    modules = [name for name in ("deepspeed", "megatron.core") if name in sys.modules]
    print("imported:", modules, torch.distributed.is_initialized(), file=sys.stderr)
"""


def test_interactive_generation_from_a_pipe(tmp_path):
    write_checkpoint(tmp_path / "run", "kerple_log", "nowhere")
    keys = {"load": str(tmp_path / "run"), "maximum_tokens": 8, "temperature": 1.0, "text_gen_type": "interactive"}
    config = write_yaml(tmp_path / "all.yml", settings_of("kerple_log", "nowhere", **keys))
    (tmp_path / "sitecustomize.py").write_text(CHECK)
    result = subprocess.run(
        [sys.executable, str(ROOT / "generate.py"), str(config)],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        input="def f\nab\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.encode()) >= 2
    assert "imported: [] False" in result.stderr
