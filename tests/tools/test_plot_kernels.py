"""tools/plot_kernels.py: a picture of each method, before and after training, and the page."""

import re
import struct
import subprocess
import sys

import pytest

from megatron.config import UserError
from megatron.evaluation.kernel_plots import curves, draw, initial_methods, write_page
from megatron.model.positional import NoPositions, primary_names
from tests.support.checkpoints import write_checkpoint
from tests.support.runs import ROOT, environment


def width(png: bytes) -> int:
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">I", png[16:20])[0]


def test_the_page_has_every_method(tmp_path):
    for pos_emb in ("kerple_log", "rotary"):
        write_checkpoint(tmp_path / pos_emb, pos_emb, "nowhere")
    command = [sys.executable, str(ROOT / "tools" / "plot_kernels.py"), "--output", str(tmp_path / "page.md")]
    folders = [str(tmp_path / "kerple_log"), str(tmp_path / "rotary")]
    done = subprocess.run(
        [*command, "--checkpoint", *folders], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\(pictures/(\w+)\.png\)", page))
    assert drawn == {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert {"kerple_log", "alibi", "sandwich", "kerple_square__a"} <= drawn
    named = set(re.findall(r"^## (\w+)$|^- `(\w+)`:", page, flags=re.MULTILINE))
    assert {a or b for a, b in named} == set(primary_names())
    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert all(len(picture) < 80_000 for picture in pictures.values())
    # Two columns where there is a checkpoint, one elsewhere.
    assert width(pictures["kerple_log"]) > 1.5 * width(pictures["alibi"])


def test_curves_are_those_of_the_method():
    method = initial_methods()["kerple_power_ap_ap"]
    found = curves(method)
    assert set(found) == {"bias", "weight"}
    assert found["bias"].shape[0] == 4
    assert (found["weight"][:, 0] == 1).all()
    assert draw("none", {"at initialization": NoPositions()}) is None


def test_two_checkpoints_of_one_method_are_refused(tmp_path):
    for folder in ("one", "two"):
        write_checkpoint(tmp_path / folder, "alibi", "nowhere")
    with pytest.raises(UserError, match="two: a checkpoint of pos-emb alibi was given before"):
        write_page(tmp_path / "page.md", [tmp_path / "one", tmp_path / "two"])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "plot_kernels.py"), "--checkpoint", str(tmp_path / "none")],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr
