"""benchmarks/first_contact.sh: which commands it runs, with a stub in place of Python; and what its
parts share.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train_step_gpu
from benchmarks.support.gpu import print_results
from benchmarks.support.models import PlainConfig, initialized_gpt
from kerple.attention import dispatch
from kerple.doctor import run_in_processes
from megatron.config.schema.model import ModelConfig
from megatron.model.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["cli.doctor", "train_step_gpu", "engine_gpu", "attention_gpu", "benchmarks.support.gpu"]


@pytest.fixture(autouse=True)
def own_backends(monkeypatch):
    """The benchmarks register a backend of their own."""
    monkeypatch.setattr(dispatch, "BACKENDS", dict(dispatch.BACKENDS))


@pytest.mark.parametrize(
    ("failing", "options", "status"),
    [
        ("nothing", ["--dry-run"], 0),
        ("nothing", ["--full"], 0),
        ("doctor", [], 1),
        ("nothing", ["--ful"], 2),
    ],
)
def test_all_parts_run(tmp_path, failing, options, status):
    """A failure of one part does not prevent the others."""
    stub, log = tmp_path / "python", tmp_path / "commands"
    stub.write_text(f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in *cli.{failing}*) exit 1;; esac\n')
    stub.chmod(0o755)
    script = tmp_path / "benchmarks" / "first_contact.sh"
    script.parent.mkdir()
    script.write_text((ROOT / "benchmarks/first_contact.sh").read_text())
    environment = {"PYTHON": str(stub), "PATH": "/usr/bin:/bin"}
    assert (
        subprocess.run(
            ["bash", str(script), *options], env=environment, capture_output=True
        ).returncode
        == status
    )
    if status == 2:
        assert not log.exists()
        return
    commands = log.read_text().splitlines()
    parts = PARTS if "--full" not in options else [*PARTS[:3], "evaluation_gpu", *PARTS[3:]]
    for command, part in zip(commands, parts, strict=True):
        assert part in command
        if part.endswith("_gpu"):
            assert ("--dry-run" in command) == ("--dry-run" in options)
        if part in ("train_step_gpu", "attention_gpu"):
            assert ("--quick" in command) == ("--full" not in options)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"name": "fused", "ms": 1.0}, 0),
        ({"name": "fused", "failed": "OutOfMemoryError"}, 1),
        ({"check": "rpe", "ok": False}, 1),
        ({"name": "fused", "skipped": "time limit"}, 1),
    ],
)
def test_the_table_shows_failures(row, status, tmp_path, capsys):
    assert print_results(tmp_path) == 1
    (tmp_path / "attention.json").write_text(
        json.dumps({"rows": [row, {"check": "none", "ok": True}]})
    )
    assert print_results(tmp_path) == status
    output = capsys.readouterr().out
    assert all(str(value) in output for value in row.values() if not isinstance(value, float))
    assert "none" not in output


@pytest.mark.ci
def test_they_need_only_pytorch_and_triton():
    """A GPU machine that is set up for a short time has no other packages."""
    blocked = ("pydantic", "rich", "psutil", "yaml", "deepspeed", "megatron.core")
    modules = (
        "benchmarks.attention_gpu, benchmarks.train_step_gpu, benchmarks.evaluation_gpu, "
        "megatron.cli.doctor"
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_table_has_a_line_for_each_missing_part(tmp_path, capsys):
    (tmp_path / "engine.json").write_text(json.dumps({"rows": [{"name": "step", "ms": 1.0}]}))
    assert print_results(tmp_path, ["doctor", "engine", "attention"]) == 1
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line[1:] == ["no"]] == ["doctor", "attention"]


def divided(a, b):
    if b == 0:
        os._exit(9)  # as by a segmentation fault
    return a // b


def test_results_of_several_processes():
    """In order; a process that ends loses its own result only."""
    calls = [(7, 2), (1, 0), (9, 4), (5, 5), (2, 0), (8, 2)]
    assert run_in_processes(divided, calls, 2, lambda a, b: -a) == [3, -1, 2, 1, -2, 4]


def test_without_a_baseline_there_are_no_ratios(tmp_path, monkeypatch):
    """Another method must not take the place of the plain model."""
    monkeypatch.setattr(
        sys, "argv", ["train_step_gpu.py", "--dry-run", "--json", str(tmp_path / "steps.json")]
    )

    def fail(*sizes):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(train_step_gpu, "PlainDecoder", fail)
    assert train_step_gpu.main() == 0
    first, *others = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert "out of memory" in first["failed"]
    assert [(row["ratio_to_plain"], row["seconds_per_step"] > 0) for row in others] == [
        (None, True)
    ] * 2


@pytest.mark.parametrize("pos_emb", ["none", "rotary", "kerple_log", "learned"])
def test_their_model_is_that_of_the_configuration(pos_emb):
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "pos_emb": pos_emb,
    }
    configs = PlainConfig(**sizes), ModelConfig(**sizes, no_weight_tying=True)
    plain, configured = (initialized_gpt(ModelSettings(config, 64)) for config in configs)
    assert str(plain) == str(configured)
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(plain.loss(tokens, tokens), configured.loss(tokens, tokens))
    read = {
        name: getattr(configs[1], name)
        for name in {**vars(configs[0]), **vars(PlainConfig)}
        if name[0] != "_"
    }
    assert {name: getattr(configs[0], name) for name in read} == {**read, "positional_options": {}}
