"""benchmarks/first_contact.sh: which commands it runs, with a stub in place of Python; and what its parts share."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.support.gpu import print_results
from benchmarks.support.models import PlainConfig, initialized_gpt
from kerple.doctor import run_in_processes
from megatron.config.schema.model import ModelConfig
from megatron.model.settings import ModelSettings

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["cli.doctor", "engine_gpu", "attention_gpu", "train_step_gpu", "benchmarks.support.gpu"]


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
    assert subprocess.run(["bash", str(script), *options], env=environment, capture_output=True).returncode == status
    if status == 2:
        assert not log.exists()
        return
    commands = log.read_text().splitlines()
    parts = PARTS if "--full" not in options else [*PARTS[:4], "evaluation_gpu", PARTS[4]]
    for command, part in zip(commands, parts, strict=True):
        assert part in command
        if part.endswith("_gpu"):
            assert ("--dry-run" in command) == ("--dry-run" in options)
        if part in PARTS[2:4]:
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
    (tmp_path / "attention.json").write_text(json.dumps({"rows": [row, {"check": "none", "ok": True}]}))
    assert print_results(tmp_path) == status
    output = capsys.readouterr().out
    assert all(str(value) in output for value in row.values() if not isinstance(value, float))
    assert "none" not in output


@pytest.mark.ci
def test_they_need_only_pytorch_and_triton():
    """A GPU machine that is set up for a short time has no other packages."""
    blocked = ("pydantic", "rich", "psutil", "yaml", "deepspeed", "megatron.core")
    modules = "benchmarks.attention_gpu, benchmarks.train_step_gpu, benchmarks.evaluation_gpu, megatron.cli.doctor"
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_results_of_several_processes_are_in_order():
    assert run_in_processes(divmod, [(7, 2), (9, 4), (5, 5)], 2) == [(3, 1), (2, 1), (1, 0)]


@pytest.mark.parametrize("pos_emb", ["none", "rotary", "kerple_log", "learned"])
def test_their_model_is_that_of_the_configuration(pos_emb):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "pos_emb": pos_emb}
    configs = PlainConfig(**sizes), ModelConfig(**sizes, no_weight_tying=True)
    plain, configured = (initialized_gpt(ModelSettings(config, 64)) for config in configs)
    assert str(plain) == str(configured)
    tokens = torch.arange(32).view(2, 16)
    assert torch.equal(plain.loss(tokens, tokens), configured.loss(tokens, tokens))
    read = {name: getattr(configs[1], name) for name in {**vars(configs[0]), **vars(PlainConfig)} if name[0] != "_"}
    assert {name: getattr(configs[0], name) for name in read} == {**read, "positional_options": {}}
