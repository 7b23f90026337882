"""The fused kernels in a model's training, and the machine code that Triton compiles for a GPU, which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.language_models import random_tokens, small_gpt

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_no_kernel_spills_registers_or_serializes_matrix_products(tmp_path):
    """Without tables, with a bias, and with bias and weight, for coefficients and for any table.

    The bounds hold for every Triton version in requirements/dev.txt; benchmarks/kernel_counts.py prints the counts.
    """
    rows = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/kernel_counts.py", "--check", "--json", str(rows)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    counts = {(row["variant"], row["kernel"]): row for row in json.loads(rows.read_text())}
    assert len(counts) == 13
    # Pairs at the same distance share a load: fewer than 3 loads for 4 pairs. A warp loads for 32 pairs at once.
    assert 0 < counts["bias", "query"]["LDG"] < 8192 / 32 * 3 / 4
    # Two directions cost far less than a kernel that recomputes all scores.
    two_directions, bias = counts["bias, 2 directions", "query"], counts["bias", "query"]
    any_table = counts["bias, any table's gradient", "tables"]
    assert two_directions["instructions"] - bias["instructions"] < any_table["instructions"] / 2


@pytest.mark.parametrize(
    ("pos_emb", "options", "checkpoint_every"),
    [("kerple_power_ap_ap", {}, 1), ("kerple_log", {"parameters": "per-layer"}, 1), ("rpe", {"num_buckets": 8}, 0)],
)
def test_a_model_has_the_same_loss_and_gradients_as_with_chunked(pos_emb, options, checkpoint_every):
    """Including the method's parameters, with activation checkpointing and without."""
    tokens = random_tokens(41)[None].to(DEVICE)
    runs = []
    for backend in ("fused", "chunked"):
        model = small_gpt(
            pos_emb,
            hidden_size=16,
            num_heads=2,
            attention_backend=backend,
            pos_emb_options=tuple(options.items()),
        )
        torch.manual_seed(0)
        for method in model.positional_methods().values():
            method.reset_parameters()
        model.checkpoint_every = checkpoint_every
        loss = model.to(DEVICE).train().loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        runs.append({"loss": loss.detach(), **{name: leaf.grad for name, leaf in model.named_parameters()}})
    assert sum("rpe" in name for name in runs[0]) == {"kerple_log": 4, "kerple_power_ap_ap": 4, "rpe": 1}[pos_emb]
    for name, expected in runs[1].items():
        assert expected.abs().max() > 1e-7, name
        torch.testing.assert_close(
            runs[0][name], expected, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: name + text
        )
