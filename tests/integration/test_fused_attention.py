"""The fused kernels in a model's training, and the machine code that Triton compiles for a GPU,
which needs no GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.language_models import random_tokens, small_gpt

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def counted(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of benchmarks/kernel_counts.py, whose check must pass.

    Its bounds hold for every Triton version in requirements/dev.txt.
    """
    rows = tmp_path / "rows.json"
    command = [
        sys.executable,
        "benchmarks/kernel_counts.py",
        "--check",
        "--json",
        str(rows),
        *options,
    ]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(rows.read_text())


@pytest.mark.ci
def test_kernels_of_the_log_kernel_for_hopper(tmp_path):
    """In training, they have a bias and two directions of its jacobian."""
    rows = counted(tmp_path, "--variants", "bias, 2 directions")
    assert {row["kernel"] for row in rows} == {"forward", "key and value", "query"}


@pytest.mark.slow
def test_kernels_for_hopper(tmp_path):
    """Without tables, with a decay, with a bias, and with bias and weight, for coefficients and for
    any table.
    """
    counts = {(row["variant"], row["kernel"]): row for row in counted(tmp_path)}
    assert len(counts) == 17
    # Pairs at the same distance share a load: fewer than 3 loads for 4 pairs. A warp loads for 32
    # pairs at once.
    assert 0 < counts["bias", "query"]["LDG"] < 8192 / 32 * 3 / 4
    # A decay needs no shared memory.
    for kernel in ("forward", "key and value", "query"):
        assert counts["decay", kernel]["shared"] == counts["no position", kernel]["shared"]
    # Two directions cost far less than a kernel that recomputes all scores.
    two_directions, bias = counts["bias, 2 directions", "query"], counts["bias", "query"]
    assert (
        two_directions["instructions"] - bias["instructions"]
        < counts["bias", "tables"]["instructions"] / 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--sizes", "64"],
        ["--sizes", "128", "--window"],
        ["--grouped"],
        ["--sizes", "64", "--dtypes", "fp16", "fp32"],
    ],
)
def test_kernels_for_documents(options, tmp_path):
    rows = counted(
        tmp_path, "--documents", "--arch", "80", "86", "89", "90", "100", "120", *options
    )
    assert {row["kernel"] for row in rows} == {"forward", "key and value", "query", "tables"} - (
        {"tables"} if "--window" in options else set()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--sizes", "16", "32", "64", "80", "128"],
        ["--sizes", "64", "128", "--window"],
        ["--sizes", "64", "128", "--dtypes", "fp16", "fp32"],
        ["--sizes", "16", "64", "80", "128", "--grouped"],
        ["--sizes", "64", "128", "--grouped", "--dtypes", "fp16", "fp32"],
        ["--sizes", "64", "128", "--grouped", "--window"],
    ],
    ids=["sizes", "window", "dtypes", "grouped", "grouped dtypes", "grouped window"],
)
@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
def test_every_kernel_for_every_gpu(arch, options, tmp_path):
    assert counted(tmp_path, "--arch", arch, *options)


@pytest.mark.parametrize(
    ("pos_emb", "options", "checkpoint_every"),
    [
        ("kerple_power_ap_ap", {}, 1),
        ("kerple_log", {"parameters": "per-layer"}, 1),
        ("rpe", {"num_buckets": 8}, 0),
    ],
)
@pytest.mark.quick(1)
def test_a_model_has_the_same_loss_and_gradients_as_with_chunked(
    pos_emb, options, checkpoint_every
):
    """Including the method's parameters, with activation checkpointing and without."""
    tokens = random_tokens(41)[None].to(DEVICE)
    runs = []
    for backend in ("fused", "chunked"):
        model = small_gpt(
            pos_emb,
            hidden_size=16,
            num_attention_heads=2,
            attention_backend=backend,
            pos_emb_options=options,
        )
        torch.manual_seed(0)
        for method in model.positional_methods().values():
            method.reset_parameters()
        model.checkpoint_every = checkpoint_every
        loss = model.to(DEVICE).train().loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        runs.append(
            {"loss": loss.detach(), **{name: leaf.grad for name, leaf in model.named_parameters()}}
        )
    assert (
        sum("rpe" in name for name in runs[0])
        == {"kerple_log": 4, "kerple_power_ap_ap": 4, "rpe": 1}[pos_emb]
    )
    for name, expected in runs[1].items():
        assert expected.abs().max() > 1e-7, name
        torch.testing.assert_close(
            runs[0][name], expected, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: name + text
        )
