"""Sources of a self-contained model: the positional method and all it imports, and nothing else of
this project.
"""

import ast
import importlib
import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from kerple.positional import PositionalMethod, primary_names, registry
from megatron.checkpoint.storage import CheckpointError
from megatron.convert import to_hugging_face
from megatron.convert.sources import self_contained_files
from tests.support.conversion import LONG, make_model, quiet, random_tokens
from tests.support.exported import export, load


def test_files_import_only_torch_transformers_and_each_other():
    """And the standard library."""
    checked = set()
    for pos_emb in primary_names():
        files = self_contained_files(pos_emb)
        stems = {name.rpartition("_")[0] for name in files}
        assert stems >= {"modeling_kerple", "configuration_kerple", "positional_method"}
        for name, text in files.items():
            if text not in checked:
                check_imports(name, text, files)
            checked.add(text)


def check_imports(name: str, text: str, files: dict[str, str]) -> None:
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert f"{node.module}.py" in files, name
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in allowed, name
        elif isinstance(node, ast.Import):
            assert {item.name.partition(".")[0] for item in node.names} <= allowed, name


def test_other_imports_of_this_project_are_rejected(tmp_path, monkeypatch):
    source = tmp_path / "outside_method.py"
    source.write_text(
        "from kerple.positional import PositionalMethod\nfrom megatron.config import Config\n\n\n"
        "class Outside(PositionalMethod):\n    config = Config\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import outside_method

    assert issubclass(outside_method.Outside, PositionalMethod)
    monkeypatch.setitem(registry._METHODS, "outside", outside_method.Outside)
    with pytest.raises(CheckpointError, match=r"megatron\.config"):
        self_contained_files("outside")


def test_an_external_method(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    (tmp_path / "mymethods").mkdir()
    (tmp_path / "mymethods" / "decay.py").write_text(  # one of ours has this name, too
        "import torch\n"
        "from torch import nn\n"
        "from kerple.positional import PositionalMethod, register\n"
        "from kerple.positional.base import (\n    bounded,\n    draw,\n)\n\n\n"
        "@register('square_root_bias')\n"
        "class SquareRootBias(PositionalMethod):\n"
        "    shared = False\n\n"
        "    def __init__(self, num_heads, floor=0.0):\n"
        "        super().__init__()\n"
        "        self.floor = floor\n"
        "        self.slope = nn.Parameter(torch.empty(num_heads, 1, 1))\n"
        "        self.reset_parameters()\n\n"
        "    def reset_parameters(self, generator=None):\n"
        "        draw(self.slope, 'uniform', 0.0, 1.0, generator)\n\n"
        "    def bias(self, distance):\n"
        "        slope = bounded(self.slope, self.floor).reshape(-1, *[1] * distance.dim())\n"
        "        return -slope * distance.sqrt()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    keys = {"pos_emb_module": "mymethods.decay", "pos_emb_options": {"floor": 0.02}}
    model, config = make_model("square_root_bias", **keys)
    to_hugging_face(model, config, tmp_path / "hf", report=quiet)
    written = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", trust_remote_code=True, dtype=torch.float32
    ).eval()
    tokens = random_tokens(1, LONG)
    with torch.no_grad():
        assert (written(tokens).logits - model(tokens)).abs().max() < 1e-4
    sources = "".join(path.read_text() for path in (tmp_path / "hf").glob("positional_*.py"))
    assert "from megatron" not in sources
    assert "import megatron" not in sources


@torch.no_grad()
def test_exports_in_one_folder(tmp_path, monkeypatch):
    """transformers 4.57 to 5.5 loads folders of the same name as one package."""
    both = tmp_path / "both_exports"
    both.mkdir()
    exported = [export("rpe"), export("fire")]
    for _, path in exported:
        for source in path.glob("*.py"):
            assert not (both / source.name).exists()
            shutil.copy(source, both)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokens = random_tokens(1, LONG)
    for model, path in exported:
        module, name = json.loads((path / "config.json").read_text())["auto_map"][
            "AutoModelForCausalLM"
        ].split(".")
        model_class = getattr(importlib.import_module(f"both_exports.{module}"), name)
        written = model_class.from_pretrained(path, dtype=torch.float32).eval()
        assert (written(tokens).logits - model(tokens)).abs().max() < 1e-4


def test_code_of_another_method_is_rejected():
    with pytest.raises(ValueError, match=r"positional_method sandwich.*alibi"):
        load(export("alibi")[1], positional_method="sandwich")
