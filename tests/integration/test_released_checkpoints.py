"""Training resumes from checkpoints in the layout of the KERPLE release."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.directory import layer_file
from megatron.checkpoint.storage import CheckpointError, load_file
from megatron.cli import import_release
from megatron.config import Config
from megatron.data.datasets import build_datasets
from megatron.inference import load_model
from megatron.tokenizer.tokenizer import build_tokenizer
from megatron.training.loop import train
from tests.support.attention import LargestStorage
from tests.support.release import METHODS, checkpoints
from tests.support.released_runs import released_settings, write_release_corpus, write_tokenizer
from tests.support.runs import metrics, unwrapped, weights


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released")
    write_tokenizer(folder)
    write_release_corpus(folder)
    return folder


def losses_with_torch_adam(method, settings, *, steps):
    """The same iterations with torch's Adam and the release's optimizer state dictionary.

    The dictionary numbers parameters in the order of the layer files. For the power kernels, our
    modules have another order.
    """
    config = Config.from_flat(settings)
    tokenizer = build_tokenizer("HFTokenizer", config.tokenizer.vocab_file, None)
    dataset = build_datasets(config, tokenizer, 32, ((300 + steps) * 4, 0, 0)).train
    model, _ = load_model(checkpoints(method))
    model.train()
    optimizer = torch.optim.Adam(in_file_order(method, model), lr=0.005)
    optimizer.load_state_dict(
        load_file(checkpoints(method) / "global_step300/mp_rank_00_model_states.pt")["optimizer"]
    )
    losses = {}
    for step in range(steps):
        samples = [dataset[1200 + 4 * step + row] for row in range(4)]
        tokens, labels = (
            torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels")
        )
        loss = model.loss(tokens, labels)
        losses[301 + step] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


def in_file_order(method, model):
    """Each parameter once, in the order of its first occurrence in the layer files."""
    parameters = {}
    for index, layer in model.layers().items():
        file = checkpoints(method) / "global_step300" / layer_file(Path(), index, 0)
        names = torch.load(file, weights_only=True) if file.is_file() else {}
        own = dict(layer.named_parameters())
        parameters |= {
            id(own[name]): own[name]
            for name in names
            if name in own and id(own[name]) not in parameters
        }
    assert len(parameters) == len(list(model.parameters()))
    return parameters.values()


@pytest.mark.parametrize("method", ["kerple_log", "rpe", "learned", "kerple_power_ap_ap"])
@pytest.mark.quick(2)
def test_the_optimizer_state_of_the_release_is_used(method, corpus, tmp_path, capsys):
    settings = released_settings(tmp_path, corpus, method, train_iters=306)
    train(Config.from_flat(settings))
    output = unwrapped(capsys.readouterr().out)
    assert "iteration 300, 1200 samples read" in output
    assert "formulas: lr-schedule neox-2022" in output
    assert "iteration and optimizer state" in output
    expected = losses_with_torch_adam(method, settings, steps=6)
    assert metrics(tmp_path) == pytest.approx(expected, abs=5e-6)


def test_no_load_optim_resets_the_optimizer(corpus, tmp_path, capsys):
    train(Config.from_flat(released_settings(tmp_path / "loaded", corpus)))
    train(Config.from_flat(released_settings(tmp_path / "fresh", corpus, no_load_optim=True)))
    assert "starts from scratch (no-load-optim)" in unwrapped(capsys.readouterr().out)
    loaded, fresh = metrics(tmp_path / "loaded"), metrics(tmp_path / "fresh")
    assert loaded[301] == fresh[301]
    assert abs(loaded[302] - fresh[302]) > 5e-3


def test_a_checkpoint_without_optimizer_state(corpus, tmp_path, capsys):
    keys = {
        "load": str(checkpoints("kerple_log_bf16")),
        "precision": "bfloat16",
        "train_iters": 303,
    }
    train(Config.from_flat(released_settings(tmp_path, corpus, **keys)))
    output = unwrapped(capsys.readouterr().out)
    assert "starts from scratch (the checkpoint has no optimizer state)" in output
    assert list(metrics(tmp_path)) == [301, 302, 303]


def test_an_imported_archive_resumes(corpus, tmp_path, capsys):
    archive = shutil.make_archive(str(tmp_path / "release"), "zip", checkpoints("kerple_log"))
    import_release.main([archive, "-o", str(tmp_path / "imported"), "--json"])
    load = json.loads(unwrapped(capsys.readouterr().out))["load"]
    train(Config.from_flat(released_settings(tmp_path, corpus, load=load, train_iters=302)))
    assert "global_step300: not saved by this project; loaded weights" in unwrapped(
        capsys.readouterr().out
    )
    assert list(metrics(tmp_path)) == [301, 302]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.quick(5)
def test_every_method_resumes_and_is_saved_in_our_layout(method, corpus, tmp_path):
    """Buffers that only the release has (inv_freq, slopes) are ignored and not saved."""
    folder = tmp_path / "checkpoints"
    train(
        Config.from_flat(
            released_settings(tmp_path, corpus, method, train_iters=301, save=str(folder))
        )
    )
    assert list(metrics(tmp_path)) == [301]
    assert not any("inv_freq" in name or "slopes" in name for name in weights(tmp_path, 301))


def test_parameters_beyond_their_bounds_are_clamped_before_the_first_step(corpus, tmp_path):
    """The release clamps them too; its checkpoints contain values beyond the bounds."""
    release = tmp_path / "release"
    shutil.copytree(checkpoints("kerple_log"), release)
    for file in (release / "global_step300").glob("layer_*.pt"):
        layer = torch.load(file, weights_only=True)
        if "attention.rpe.bias_a" in layer:
            layer["attention.rpe.bias_a"].fill_(-1.0)
            torch.save(layer, file)
    folder = tmp_path / "checkpoints"
    keys = {"load": str(release), "save": str(folder), "no_load_optim": True, "train_iters": 301}
    train(Config.from_flat(released_settings(tmp_path, corpus, **keys)))
    after = weights(tmp_path, 301)[
        "layer_02-model_00-model_states.pt/attention.rpe.bias_a"
    ].flatten()
    # The first step of Adam is the learning rate times the gradient's sign.
    assert all(min(abs(value - 0.01), abs(value - 0.015)) < 1e-6 for value in after.tolist())
    assert after.max() > 0.014


def test_sizes_are_compared_before_the_model_is_built(corpus, tmp_path, monkeypatch):
    def build(*_):
        raise AssertionError("the model was built")

    monkeypatch.setattr("megatron.training.loop.build_engine", build)
    with pytest.raises(CheckpointError, match=r"layer_00.*128, 32.*64"):
        train(Config.from_flat(released_settings(tmp_path, corpus, hidden_size=64)))


@pytest.mark.parametrize("method", ["kerple_log", "learned"])
def test_the_size_check_of_a_huge_model_uses_no_memory(method, corpus, tmp_path):
    sizes = {
        "num_layers": 96,
        "hidden_size": 9216,
        "num_attention_heads": 72,
        "max_position_embeddings": 131_072,
    }
    with LargestStorage() as watched, pytest.raises(CheckpointError, match=r"6.*100"):
        train(Config.from_flat(released_settings(tmp_path, corpus, method, **sizes)))
    assert 0 < watched.elements < 10_000
