"""A positional method in a user's own file: trained, evaluated, exported."""

import shutil
import sys

import huggingface_hub
import torch
from transformers import AutoModelForCausalLM

from kerple.positional import registry
from megatron.checkpoint.configuration import code_notice
from megatron.cli.convert import main as convert
from megatron.cli.evaluate import main as evaluate
from megatron.cli.generate import main as generate
from megatron.cli.inspect import main as inspect
from megatron.cli.model_options import parse_with_checkpoint
from megatron.convert import to_hugging_face
from megatron.evaluation.records import read_results
from megatron.inference import load_model
from megatron.utils.command_line import run_main
from tests.support.conversion import make_model
from tests.support.errors import assert_rejected
from tests.support.runs import metrics, trained, unwrapped, weights

METHOD = '''
"""Bias -slope sqrt(distance) with a learned slope per head."""

import torch
from torch import nn

from kerple.positional import PositionalMethod, register
from kerple.positional.base import bounded, draw


@register("test_square_root")
class SquareRoot(PositionalMethod):
    def __init__(self, num_heads, floor=0.0):
        super().__init__()
        self.floor = floor
        self.slope = nn.Parameter(torch.empty(num_heads, 1, 1))
        self.reset_parameters()

    def reset_parameters(self, generator=None):
        draw(self.slope, "uniform", 0.0, 1.0, generator)

    def statistics(self):
        return {"slope": bounded(self.slope.detach(), self.floor).flatten()}

    def bounds(self):
        return {"slope": (self.floor, None)}

    def bias(self, distance):
        slope = bounded(self.slope, self.floor).reshape(-1, *[1] * distance.dim())
        return -slope * distance.sqrt()
'''


def test_a_custom_method(tmp_path, data_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path = tmp_path / "square_root.py"
    path.write_text(METHOD)
    keys = {
        "pos_emb": "test_square_root",
        "pos_emb_module": str(path),
        "pos_emb_options": {"floor": 0.02},
    }
    trained(tmp_path, data_path, **keys)
    assert len(metrics(tmp_path, "kernel/slope/mean")) > 1
    saved = weights(tmp_path, 6)
    assert any(name.endswith("attention.rpe.slope") for name in saved)
    assert not any(
        torch.equal(tensor, weights(tmp_path, 3)[name])
        for name, tensor in saved.items()
        if "slope" in name
    )

    folder = tmp_path / "checkpoints"
    arguments = ["--lengths", "32", "64", "--tokens", "64", "--output", str(tmp_path / "report")]
    evaluate(["--checkpoint", str(folder), *arguments, "--set", f"pos-emb-module={path}"])
    rows = read_results(tmp_path / "report")
    assert [(row["pos_emb"], row["length"]) for row in rows] == [
        ("test_square_root (floor 0.02)", 32),
        ("test_square_root (floor 0.02)", 64),
    ]
    assert all(0 < row["loss"] < 10 for row in rows)

    with monkeypatch.context() as patch:
        patch.delitem(registry._METHODS, "test_square_root")
        inspect([str(folder)])
        assert "--pos-emb-module FILE" in capsys.readouterr().out
    inspect([str(folder), "--pos-emb-module", str(path)])
    assert "pos-emb         test_square_root" in capsys.readouterr().out

    model, config = load_model(folder, overrides={"pos_emb_module": str(path)})
    to_hugging_face(model, config, tmp_path / "hf", report=lambda _: None)
    exported = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", trust_remote_code=True, dtype=torch.float32
    )
    tokens = torch.arange(1, 65)[None]
    with torch.no_grad():
        assert (exported.eval()(tokens).logits - model(tokens)).abs().max() < 1e-4

    # Read the export where the file is not loaded yet.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    exported, module = str(tmp_path / "hf"), registry.method_class("test_square_root").__module__
    convert_words = [
        "from-hf",
        exported,
        str(tmp_path / "back"),
        "--no-tokenizer",
        "--pos-emb-module",
        str(path),
    ]
    for read in (
        lambda: convert(convert_words),
        lambda: parse_with_checkpoint(
            "", ["--checkpoint", exported, "--set", f"pos-emb-module={path}"], lambda parser: None
        ),
        lambda: load_model(exported, overrides={"pos_emb_module": str(path)}),
    ):
        del registry._METHODS["test_square_root"], sys.modules[module]
        shutil.rmtree(tmp_path / "home", ignore_errors=True)
        read()


def test_a_custom_method_that_changed(tmp_path, data_path, monkeypatch, capsys):
    """A resumed run says so, and so do the commands that read its checkpoints."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path, folder = tmp_path / "root.py", str(tmp_path / "checkpoints")
    path.write_text(METHOD.replace("test_square_root", "test_root"))
    keys = {"pos_emb": "test_root", "pos_emb_module": str(path), "eval_iters": 0}
    trained(tmp_path, data_path, **keys, train_iters=1)
    commands = (
        lambda: trained(tmp_path, data_path, **keys, train_iters=1),
        lambda: generate(["--checkpoint", folder, "--set", f"pos_emb_module={path}"]),
        lambda: inspect([folder, "--pos-emb-module", str(path)]),
        lambda: convert(["to-hf", folder, str(tmp_path / "hf"), "--pos-emb-module", str(path)]),
    )
    for command in commands:
        capsys.readouterr()
        command()
        output = capsys.readouterr()
        assert "has changed" not in unwrapped(output.out + output.err)
    shutil.rmtree(tmp_path / "hf")

    # In a wrapper, too. Another method has another file.
    layers = {"methods": [{"test_root": {"floor": 0.5}}, "none"]}
    wrapped = {**keys, "pos_emb": "per_layer", "pos_emb_options": layers}
    places = {name: str(tmp_path / "wrapped") for name in ("save", "load")}
    trained(tmp_path, data_path, **wrapped, **places, train_iters=1)
    path.write_text(f"{path.read_text()}LIMIT = 3\n")
    commands += (lambda: trained(tmp_path, data_path, **wrapped, **places, train_iters=1),)
    for command in commands:
        capsys.readouterr()
        command()
        output = capsys.readouterr()
        assert unwrapped(output.out + output.err).count("has changed") == 1
    new = {"finetune": True, "pos_emb": "alibi", "save": str(tmp_path / "tuned")}
    trained(tmp_path, data_path, **{**keys, **new}, train_iters=1)
    assert "has changed" not in unwrapped(capsys.readouterr().out)


def test_an_exported_method_that_changed(tmp_path, monkeypatch, capsys):
    """The commands that read the export say so, until the file is restored."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "home"))
    path, exported = tmp_path / "exported_root.py", str(tmp_path / "hf")
    source = METHOD.replace("test_square_root", "test_exported_root")
    path.write_text(source)
    model, config = make_model("test_exported_root", pos_emb_module=str(path))
    to_hugging_face(model, config, exported, report=lambda _: None)
    module = ["--pos-emb-module", str(path)]
    commands = (
        lambda name: convert(
            ["from-hf", exported, str(tmp_path / name), "--no-tokenizer", *module]
        ),
        lambda name: load_model(exported, overrides={"pos_emb_module": str(path)}),
        lambda name: convert(
            ["to-hf", str(tmp_path / name), str(tmp_path / f"{name}-hf"), "--no-tokenizer", *module]
        ),
    )

    def notices(name: str) -> list[int]:
        counts = []
        for command in commands:
            command(name)
            output = capsys.readouterr()
            counts.append(
                unwrapped(output.out + output.err).count("test_exported_root has changed")
            )
        return counts

    assert notices("same") == [0, 0, 0]
    path.write_text(f"{source}LIMIT = 3\n")
    assert notices("changed") == [1, 1, 1]
    path.write_text(source)
    assert notices("restored") == [0, 0, 0]
    assert not code_notice(tmp_path / "changed" / "global_step0", config)


MATRIX = """
import torch
from kerple.positional import Bias, register


@register("test_features")
class Features(Bias):
    def __init__(self, num_heads):
        super().__init__()
        self.mix = torch.nn.Parameter(torch.full((num_heads, 2), 0.1))

    def bias(self, distance):
        features = torch.stack((distance, distance.sqrt()), dim=-1)
        return -(features @ self.mix.T).movedim(-1, 0)
"""


def test_an_error_names_the_line_of_the_method(tmp_path, data_path, monkeypatch, capsys):
    """A matrix product of float32 features and bf16 parameters."""
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "features.py"
    path.write_text(MATRIX)
    keys = {"pos_emb": "test_features", "pos_emb_module": str(path), "precision": "bfloat16"}
    assert run_main(lambda: trained(tmp_path, data_path, **keys)) == 2
    line = MATRIX.splitlines().index("        return -(features @ self.mix.T).movedim(-1, 0)") + 1
    assert f"{path}, line {line}, in bias" in capsys.readouterr().err


def test_a_bias_for_another_number_of_heads(tmp_path, data_path, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path = tmp_path / "features.py"
    path.write_text(MATRIX.replace("movedim(-1, 0)", "movedim(-1, 0)[:1]"))
    keys = {"pos_emb": "test_features", "pos_emb_module": str(path)}
    assert_rejected(r"\.bias returned \[1, \d+\].*heads", trained, tmp_path, data_path, **keys)


def test_a_bias_that_depends_on_the_distances_it_is_asked_for(tmp_path, data_path, monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    path = tmp_path / "features.py"
    path.write_text(MATRIX.replace("distance.sqrt()", "distance / distance.shape[-1]"))
    keys = {"pos_emb": "test_features", "pos_emb_module": str(path)}
    assert_rejected(r"test_features: Features\.bias", trained, tmp_path, data_path, **keys)
    assert not (tmp_path / "checkpoints").exists()
