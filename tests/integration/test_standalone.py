"""kerple in a user's own PyTorch model: it needs only torch, and a new method is one file."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from kerple.positional import primary_names
from tests.support.model_families import family_model

ROOT = Path(__file__).resolve().parents[2]

BLOCKED = """
import sys
for name in ("megatron", "deepspeed", "pydantic", "numpy", "transformers", "yaml"):
    sys.modules[name] = None  # importing it fails
"""

ALL_METHODS = """
import torch
from kerple.attention import Attention
from kerple.positional import ConstantSlope, ModelShape, build, decay_sums, registered_names

shape = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)
for name in registered_names():
    method = build(name, shape)
    hidden = method.embed(torch.randn(2, 16, 32, requires_grad=True), torch.arange(16))
    states = hidden.view(2, 16, 4, 8).transpose(1, 2)
    sums = decay_sums(method.decay(hidden)) if "decay" in method.hooks else None
    Attention(method)(states, states, states, decay_sums=sums).square().sum().backward()
    assert all(parameter.grad is not None for parameter in method.parameters()), name
    print(name)
assert type(method := build("constant_slope", shape)) is ConstantSlope
assert "bias" in method.hooks
"""


def examples(page: str = "standalone.md") -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


NEW_METHOD = """
from kerple.positional.base import PositionalMethod
from kerple.positional.registry import register


@register("constant_slope")
class ConstantSlope(PositionalMethod):
    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def bias(self, distance):
        return -distance.expand(self.num_heads, *distance.shape)
"""


@pytest.mark.ci
def test_every_method_needs_only_torch(tmp_path):
    """In a copy of the package with a new method, which is one file."""
    shutil.copytree(
        ROOT / "kerple", tmp_path / "kerple", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "kerple" / "positional" / "constant_slope.py").write_text(NEW_METHOD)
    code = BLOCKED + examples()[0] + ALL_METHODS
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert {*primary_names(), "constant_slope"} <= set(result.stdout.split())
    assert "torch.Size([2, 100, 64])" in result.stdout


def test_the_examples_of_the_documentation(capsys):
    """Each example continues the one before."""
    assert len(examples()) == 9
    exec("".join(examples()), {})
    assert "torch.Size([2, 100, 64])" in capsys.readouterr().out


def test_models_of_transformers(tmp_path, monkeypatch):
    """The code of docs/transformers.md, with a tiny model."""
    monkeypatch.chdir(tmp_path)
    family_model("llama").save_pretrained("FOLDER")
    (code,) = examples("transformers.md")
    names: dict[str, object] = {}
    exec(code, names)
    model = names["model"]
    assert isinstance(model, PreTrainedModel)
    assert len(model.kerple_positional.methods) == 1
