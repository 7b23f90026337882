"""The pictures of positional methods and the page that shows them."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from experiments import pictures
from experiments.pictures import (
    distance_curves,
    initial_methods,
    main,
    method_picture,
    trained_methods,
)
from kerple.positional import primary_names
from tests.support.checkpoints import write_checkpoint
from tests.support.errors import assert_rejected

ROOT = Path(__file__).resolve().parents[3]


def test_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "render", lambda draw, style: f"{style.width}".encode())
    for pos_emb in ("kerple_log", "dape_kerple", "alibi"):
        write_checkpoint(tmp_path / pos_emb, pos_emb, "nowhere")
    folders = [str(tmp_path / name) for name in ("kerple_log", "dape_kerple", "alibi")]
    main(["--output", str(tmp_path / "page.md"), "--checkpoint", *folders])
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    plots = {path.stem: float(path.read_text()) for path in (tmp_path / "pictures").iterdir()}
    assert capsys.readouterr().out.endswith(f"page.md and {len(plots)} pictures\n")
    assert set(re.findall(r"\(pictures/(\w+)\.png\)", page)) == set(plots)
    assert set(primary_names()) - set(plots) == {
        "none",
        "learned",
        "sinusoidal",
        "cope",
        "dape",
        "dape_rotary",
    }
    names = re.findall(r"^### (\w+)$", page, flags=re.MULTILINE)
    assert sorted(names) == list(primary_names())
    assert (
        names.index("kerple")
        < names.index("alibi")
        < names.index("rotary")
        < names.index("dape_kerple")
    )
    assert "DAPE with the bias of ALiBi" in page
    current = (ROOT / "docs" / "positional-methods.md").read_text(encoding="utf-8")
    assert page == current, (
        "run experiments/pictures.py (see make pictures) after changing a description"
    )
    (tmp_path / "pictures" / "alibi.png").unlink()
    main(["--output", str(tmp_path / "page.md"), "--only", "alibi"])
    assert capsys.readouterr().out.endswith("page.md and 1 pictures\n")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == set(plots)
    two_columns = {name for name, width in plots.items() if width > 1.5 * plots["alibi"]}
    assert two_columns == {"kerple_log", "dape_kerple"}, "methods with parameters and a checkpoint"


def test_an_unknown_method_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "page.md"), "--only", "alibbi"])
    assert "'alibbi'" in capsys.readouterr().err


def test_curves():
    methods = initial_methods()
    curves = distance_curves(*methods["kerple_power_ap_ap"])
    assert set(curves) == {"bias", "weight"}
    assert curves["bias"].shape[0] == 4
    assert (curves["weight"][:, 0] == 1).all()
    picture = method_picture(
        "kerple_power_ap_ap", {"at initialization": methods["kerple_power_ap_ap"]}
    )
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 80_000
    assert method_picture("none", {"at initialization": methods["none"]}) is None
    # DAPE: the static bias plus the output of its network for a score of 0
    method = methods["dape_alibi"].method
    static = method.static.bias(torch.tensor([700.0]))[:, 0]
    hidden = F.leaky_relu(
        F.linear(torch.cat((torch.zeros(4), static)), *method.first.parameters()), 0.01
    )
    output = F.linear(hidden, *method.second.parameters())
    (curve,) = distance_curves(*methods["dape_alibi"]).values()
    torch.testing.assert_close(curve[:, 700], static + output)
    (curve,) = distance_curves(*methods["rotary"]).values()
    angles = 700.0 / 10_000 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(curve[0, 700], angles.cos().mean(), atol=1e-4, rtol=0)


def test_two_checkpoints_of_one_method_are_rejected(tmp_path):
    for folder in ("first", "second"):
        write_checkpoint(tmp_path / folder, "alibi", "nowhere")
    assert_rejected(r"second: .*alibi", trained_methods, [tmp_path / "first", tmp_path / "second"])
    assert_rejected("missing", trained_methods, [tmp_path / "missing"])
