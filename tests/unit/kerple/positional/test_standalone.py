"""Every method in anybody's PyTorch model: torch alone, the example of the documentation, and FlexAttention."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kerple.attention import attend, score_mod, tables
from kerple.positional import KerpleLog, ModelShape, NoPositions, Rotary, build, primary_names

ROOT = Path(__file__).resolve().parents[4]
SHAPE = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)

WITHOUT = """
import sys
for name in ("deepspeed", "megatron.core", "pydantic", "numpy", "transformers", "yaml"):
    sys.modules[name] = None  # importing it fails
"""

USE = """
import torch
from kerple.attention import Attention, score_table
from kerple.attention import tables
from kerple.positional import ModelShape, build, registered_names

shape = ModelShape(num_heads=4, head_size=8, hidden_size=32, num_layers=2, max_positions=64)
for name in registered_names():
    method = build(name, shape)
    hidden = method.embed(torch.randn(2, 16, 32, requires_grad=True), torch.arange(16))
    states = hidden.view(2, 16, 4, 8).transpose(1, 2)
    query, key = method.rotate(states, states, torch.arange(16), torch.arange(16))
    bias, weight = tables(method, 16, "cpu")
    table = score_table(method, 16, states.device) if method.modifies_scores else None
    attention = Attention(positional=method)
    attention(query, key, states, bias_table=bias, weight_table=weight, table=table).square().sum().backward()
    assert all(parameter.grad is not None for parameter in method.parameters()), name
    print(name)
"""


def in_a_process(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_method_needs_torch_alone():
    examples = documented()
    output = in_a_process(WITHOUT + examples[0] + USE)
    assert set(primary_names()) <= set(output.split())
    assert "torch.Size([2, 100, 64])" in output


def test_the_examples_of_the_documentation():
    """They go on from one another."""
    assert "torch.Size([2, 100, 64])" in in_a_process("".join(documented()))


def documented() -> list[str]:
    text = (ROOT / "docs" / "standalone.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 3
    return examples


def distance_methods() -> list[str]:
    built = {name: build(name, SHAPE) for name in primary_names()}
    return [name for name, method in built.items() if method.has_bias or method.has_weight]


@pytest.mark.parametrize("name", distance_methods())
@pytest.mark.parametrize("queries", [24, 5])
@torch.no_grad()
def test_score_mod_in_flex_attention(name, queries):
    torch.manual_seed(0)
    method, length = build(name, SHAPE), 24
    query, key, value = (torch.randn(2, 4, size, 8) for size in (queries, length, length))
    offset = length - queries
    mask = create_block_mask(
        lambda b, h, q, k: q + offset >= k, None, None, queries, length, device="cpu", BLOCK_SIZE=8
    )
    found = flex_attention(
        query, key, value, score_mod=score_mod(method, length, "cpu", offset=offset), block_mask=mask
    )
    bias, weight = tables(method, length, "cpu")
    exact = (None if table is None else table.double() for table in (bias, weight))
    bias, weight = exact
    expected = attend(
        query.double(), key.double(), value.double(), bias_table=bias, weight_table=weight, backend="reference"
    )
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    plain = attend(query.double(), key.double(), value.double(), backend="reference")
    assert (plain - expected).abs().max() > 1e-3


def test_methods_without_tables_have_no_score_mod():
    with pytest.raises(ValueError, match=r"Rotary has neither .*turn queries and keys by its `rotate`"):
        score_mod(Rotary(8), 16, "cpu")
    with pytest.raises(ValueError, match="NoPositions has neither bias nor weight"):
        score_mod(NoPositions(), 16, "cpu")


def test_a_score_mod_knows_the_parameters_at_its_making():
    method = KerpleLog(2)
    modify = score_mod(method, 8, "cpu")
    score = torch.zeros(())
    head, query, key = torch.tensor(1), torch.tensor(7), torch.tensor(2)
    value = modify(score, torch.tensor(0), head, query, key)
    assert value == method.bias(torch.tensor([5.0]))[1, 0]
    value.backward()
    assert method.bias_p.grad[1] != 0
