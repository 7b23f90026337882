"""The commands and files of docs/tutorial.md, in order, with a small text."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.support.runs import ROOT, environment

BLOCK = re.compile(r"```(bash|python|yaml)\n(.*?)```", re.DOTALL)


@pytest.mark.slow
def test_the_tutorial(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for path in (ROOT / "docs").glob("*.md"):
        shutil.copy(path, folder)
    sweep = tmp_path / "mytext-sweep.yml"
    for language, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if language == "python":
            (tmp_path / "square_root.py").write_text(text)
        elif language == "yaml":
            last = "    - pos_emb/alibi.yml\n"
            assert last in sweep.read_text()
            sweep.write_text(sweep.read_text().replace(last, last + text))
        else:
            for line in text.splitlines():
                command = line.replace("FOLDER", "notes").replace(
                    "kerple", f"{sys.executable} {ROOT}/kerple_command.py", 1
                )
                done = subprocess.run(
                    ["bash", "-ec", command], cwd=tmp_path, env=environment(), capture_output=True, text=True
                )
                assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    report = tmp_path / "runs" / "mytext" / "sweep" / "report"
    (table,) = (report / "tables").glob("perplexity-*.md")
    assert re.search(r"KERPLE \(log\) \| ALiBi \| square_root", table.read_text())
    assert " ± " in table.read_text()
    assert list((report / "figures").glob("extrapolation-*.png"))
    assert (tmp_path / "exported" / "model.safetensors").is_file()
