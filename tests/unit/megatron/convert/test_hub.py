"""Models of the Hugging Face hub, in a cache as huggingface_hub writes it."""

import json
import os
import runpy
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from kerple import __version__
from megatron.checkpoint.directory import find_step
from megatron.checkpoint.manifest import weights_fingerprint
from megatron.cli.convert import main as convert
from megatron.cli.evaluate import main as evaluate
from megatron.convert.hub import PATTERNS, download, local_checkpoint
from megatron.inference import load_model
from tests.support.checkpoints import write_corpus
from tests.support.conversion import LONG, random_tokens
from tests.support.corpora import part_tokens
from tests.support.errors import assert_rejected
from tests.support.families import family_model
from tests.support.language_models import direct_losses
from tests.support.runs import ROOT

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache with two commits of org/tiny. huggingface_hub is in offline mode."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    folder = tmp_path / "home" / "hub" / "models--org--tiny"
    models = {}
    for commit, branch, family in ((COMMIT, "main", "qwen3"), (OLDER, "v1", "llama")):
        models[branch] = family_model(folder / "blobs" / branch, family)
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for path in (folder / "blobs" / branch).iterdir():
            (snapshot / path.name).symlink_to(path)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / branch).write_text(commit)
        (snapshot / "modeling_tiny.py").write_text("raise SystemExit('this code must not run')")
    return models


@torch.no_grad()
def test_a_model_is_converted_once_per_commit(hub, tmp_path):
    tokens = random_tokens(1, LONG)
    for name, branch in (
        ("hf:org/tiny", "main"),
        ("hf:org/tiny@v1", "v1"),
        (f"hf:org/tiny@{COMMIT}", "main"),
    ):
        model, _ = load_model(name)
        assert (model(tokens) - hub[branch](tokens).logits).abs().max() < 1e-4
    converted = tmp_path / "home" / "kerple" / __version__ / "models--org--tiny"
    assert {path.name for path in converted.iterdir() if path.is_dir()} == {COMMIT, OLDER}
    lines = []
    assert local_checkpoint("hf:org/tiny", lines.append) == converted / COMMIT
    assert lines == []
    assert local_checkpoint("runs/hf", lines.append) == Path("runs/hf")


@torch.no_grad()
def test_a_folder_is_evaluated_directly(hub, tmp_path, capsys):
    """It is converted once, and again after it has changed."""
    folder = tmp_path / "home" / "hub" / "models--org--tiny" / "blobs" / "main"
    words = ["--checkpoint", str(folder), "--lengths", "32", "--tokens", "64"]
    data = write_corpus(tmp_path)
    words += ["--output", str(tmp_path / "report"), "--set", f"data-path={data}", "split=2,1,0"]
    evaluate(words)
    assert f"converting {folder} " in capsys.readouterr().err
    (record,) = map(json.loads, (tmp_path / "report" / "results.jsonl").read_text().splitlines())
    assert (record["checkpoint"]["path"], record["pos_emb"]) == (str(folder), "rotary (main)")
    text = torch.from_numpy(part_tokens(data, "2,1,0"))
    segments = torch.stack([text[start : start + 33] for start in (0, (len(text) - 1) // 2)])
    expected = direct_losses(hub["main"](segments[:, :-1]).logits, segments[:, 1:]).mean()
    assert record["loss"] == pytest.approx(expected.item(), abs=1e-5)
    lines = []
    converted = local_checkpoint(folder, lines.append)
    assert lines == []
    assert local_checkpoint(converted) == converted
    os.utime(folder / "model.safetensors", (0, 0))
    assert local_checkpoint(folder, lines.append) != converted
    assert len(lines) > 0


def test_models_that_cannot_be_found(hub, tmp_path):
    for name in ("hf:org/other", "hf:org/tiny@v2", "hf:a/b/c", "hf:"):
        assert_rejected(f"{name}: cannot be downloaded", download, name)
    assert_rejected(
        "hf:org/tiny.*--output", evaluate, ["--checkpoint", "hf:org/tiny", "--lengths", "32"]
    )
    snapshot = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").write_bytes(b"")
    assert_rejected(r"hf:org/tiny.*model\.safetensors", download, "hf:org/tiny")


def test_only_data_is_downloaded(monkeypatch, tmp_path):
    files = (
        *("config.json", "tokenizer.json", "tokenizer.model", "model-00001-of-00002.safetensors"),
        *("added_tokens.json", "model.safetensors-00002-of-00002.safetensors"),
        *(
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "modeling_tiny.py",
            "onnx/model.safetensors",
        ),
        *("training_args.bin", "tokenizer.py", "model.safetensors.py", "original/tokenizer.model"),
    )
    calls = []

    def snapshot_download(name, revision, allow_patterns):
        calls.append((name, revision))
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert download("hf:org/tiny@v1") == tmp_path
    assert calls == [("org/tiny", "v1")]
    assert {path.name for path in tmp_path.iterdir()} == set(files[:7])
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in PATTERNS)


def run_tool(monkeypatch, *words):
    """Run a script in tools/ckpts in this process; returns its exit status."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "tools" / "ckpts" / words[0]), run_name="__main__")
    return exit_.value.code


def test_tools_with_the_names_of_gpt_neox(hub, tmp_path, monkeypatch, capsys):
    """Import a model with GPT-NeoX's command line, inspect the checkpoint, and export it."""
    ours = str(tmp_path / "ours")
    convert(["from-hf", "hf:org/tiny", str(tmp_path / "expected"), "--no-tokenizer"])
    words = ["--tp", "4", "--model", "org/tiny", "--model_path", ours, "--no-tokenizer"]
    assert not run_tool(monkeypatch, "convert_hf_llama_to_neox.py", *words)
    assert weights_fingerprint(find_step(ours)) == weights_fingerprint(
        find_step(tmp_path / "expected")
    )
    capsys.readouterr()
    assert run_tool(monkeypatch, "inspect_checkpoints.py", ours, "--json") == 0
    assert json.loads(capsys.readouterr().out)["iteration"] == 0
    words = [
        "--input_dir",
        f"{ours}/global_step0",
        "--output_dir",
        str(tmp_path / "hf"),
        "--no_save_tokenizer",
    ]
    words += ["--config_file", "none.yml", "--precision", "fp16", "--vocab-is-hf-tokenizer"]
    assert run_tool(monkeypatch, "convert_neox_to_hf.py", *words, "--architecture", "mistral") == 2
    assert not (tmp_path / "hf").exists()
    assert not run_tool(monkeypatch, "convert_neox_to_hf.py", *words)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"
