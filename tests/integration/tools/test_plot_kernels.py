"""tools/plot_kernels.py: a picture of each method, before and after training, and the page."""

import re
import struct
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from kerple.positional import primary_names
from megatron.config import UserError
from megatron.reporting.kernel_plots import curves, draw, initial_methods, write_page
from tests.support.checkpoints import write_checkpoint
from tests.support.runs import ROOT, environment


def width(png: bytes) -> int:
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">I", png[16:20])[0]


def test_the_page_has_every_method(tmp_path):
    for pos_emb in ("kerple_log", "dape_kerple", "alibi"):
        write_checkpoint(tmp_path / pos_emb, pos_emb, "nowhere")
    command = [sys.executable, str(ROOT / "tools" / "plot_kernels.py"), "--output", str(tmp_path / "page.md")]
    folders = [str(tmp_path / name) for name in ("kerple_log", "dape_kerple", "alibi")]
    done = subprocess.run(
        [*command, "--checkpoint", *folders], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\(pictures/(\w+)\.png\)", page))
    assert drawn == {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert set(primary_names()) - drawn == {"none", "learned", "sinusoidal", "cope", "dape"}
    named = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert sorted(named) == list(primary_names())
    assert named.index("kerple") < named.index("alibi") < named.index("rotary") < named.index("dape_kerple")
    assert "DAPE on ALiBi's bias" in page
    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    assert all(len(picture) < 80_000 for picture in pictures.values())
    # Two columns where there is a checkpoint and something learned, one elsewhere.
    for name in ("kerple_log", "dape_kerple"):
        assert width(pictures[name]) > 1.5 * width(pictures["alibi"])


def test_curves_are_those_of_the_method():
    methods = initial_methods()
    found = curves(*methods["kerple_power_ap_ap"])
    assert set(found) == {"bias", "weight"}
    assert found["bias"].shape[0] == 4
    assert (found["weight"][:, 0] == 1).all()
    assert draw("none", {"at initialization": methods["none"]}) is None
    # DAPE's static bias, and what its network makes of it beside a score of 0.
    method = methods["dape_alibi"].method
    static = method.static.bias(torch.tensor([700.0]))[:, 0]
    mixed = method.second(F.leaky_relu(method.first(torch.cat((torch.zeros(4), static))), 0.01))
    (row,) = curves(*methods["dape_alibi"]).values()
    torch.testing.assert_close(row[:, 700], static + mixed)
    (row,) = curves(*methods["rotary"]).values()
    angles = 700.0 / 10_000 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(row[0, 700], angles.cos().mean(), atol=1e-4, rtol=0)


def test_two_checkpoints_of_one_method_are_refused(tmp_path):
    for folder in ("one", "two"):
        write_checkpoint(tmp_path / folder, "alibi", "nowhere")
    with pytest.raises(UserError, match="two: a checkpoint of pos-emb alibi was given before"):
        write_page(tmp_path / "page.md", [tmp_path / "one", tmp_path / "two"])
    with pytest.raises(UserError, match="none"):
        write_page(tmp_path / "page.md", [tmp_path / "none"])
