"""Runs: the encoder against plain arithmetic in float64, exact resuming, and the command as its user sees it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kerple.positional import ModelShape, build
from megatron.chomsky.encoder import Encoder, _adapted, check_method
from megatron.chomsky.experiment import Run, Settings
from megatron.cli.chomsky import METHODS, main
from megatron.utils.errors import UserError
from tests.support.runs import ROOT, environment

TINY = {
    "steps": 6,
    "batch": 4,
    "train_longest": 6,
    "test_longest": 9,
    "test_samples": 4,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
}
CPU = torch.device("cpu")


def encoder(pos_emb):
    torch.manual_seed(0)
    return Encoder(5, 3, pos_emb, num_layers=1, hidden_size=16, num_heads=2).double()


@pytest.mark.parametrize("pos_emb", ["none", "kerple_log", "kerple_bias_wht", "alibi"])
def test_encoder_attends_to_both_sides(pos_emb):
    model = encoder(pos_emb)
    symbols = torch.randint(0, 5, (2, 7))
    layer, method = model.layers[0], model.positional[0]
    hidden = model.embedding(symbols)
    qkv = layer.query_key_value(layer.attention_norm(hidden)).view(2, 7, 3, 2, 8)
    context = torch.zeros(2, 7, 2, 8, dtype=torch.float64)
    for head in range(2):
        for m in range(7):
            scores = []
            for n in range(7):
                score = (qkv[:, m, 0, head] * qkv[:, n, 1, head]).sum(-1) / 8**0.5
                delta = torch.tensor([float(abs(m - n))])
                score = score * method.weight(delta)[head] if method.has_weight else score
                scores.append(score + method.bias(delta)[head] if method.has_bias else score)
            share = torch.stack(scores, dim=1).softmax(dim=1)
            context[:, m, head] = torch.einsum("bn,bnd->bd", share, qkv[:, :, 2, head])
    hidden = hidden + layer.projection(context.reshape(2, 7, 16))
    hidden = hidden + layer.mlp(layer.mlp_norm(hidden))
    torch.testing.assert_close(model(symbols), model.output(model.norm(hidden)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pos_emb", ["dape_kerple", "dape_alibi", "fire", "dape"])
def test_adaptive_methods_look_ahead_as_they_look_back(pos_emb):
    torch.manual_seed(1)
    method = build(pos_emb, ModelShape(2, 8, 16, 1, 64)).double()
    scores, positions = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.arange(6)
    found = _adapted(scores, None, method, positions)

    def static(distance, farther):
        if pos_emb == "dape":
            return None
        if pos_emb == "fire":
            length = max(abs(method.m.item() * 512.0), farther)
            x = np.log(0.1 * distance + 1) / (np.log(0.1 * length + 1) + 1e-6)
            return method.second(method.first(torch.tensor([x], dtype=torch.float64)).relu())
        return method.static.bias(torch.tensor(float(distance))).double()

    for m in range(6):
        for n in range(6):
            score, bias = scores[:, :, m, n], static(abs(m - n), max(m, n))
            if pos_emb == "fire":
                expected = score + bias
            else:
                inputs = score if bias is None else torch.cat((score, bias.expand(3, 2)), dim=1)
                expected = score + method.second(F.leaky_relu(method.first(inputs), 0.01))
                expected = expected if bias is None else expected + bias
            torch.testing.assert_close(found[:, :, m, n], expected, rtol=1e-6, atol=1e-6)


def test_a_run_that_was_interrupted_ends_as_the_unbroken_one(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.chomsky.experiment.SAVE_SECONDS", 0.0)
    settings = Settings(**{**TINY, "steps": 20})
    whole = Run("bucket_sort", "kerple_log", 1, settings, CPU, tmp_path / "whole.pt")
    whole.train(lambda step, loss: None)

    def stop(step, loss):
        raise KeyboardInterrupt

    broken = Run("bucket_sort", "kerple_log", 1, settings, CPU, tmp_path / "broken.pt")
    with pytest.raises(KeyboardInterrupt):
        broken.train(stop)
    again = Run("bucket_sort", "kerple_log", 1, settings, CPU, tmp_path / "broken.pt")
    assert again.step == 9
    again.train(lambda step, loss: None)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    assert again.accuracy(9) == whole.accuracy(9)
    with pytest.raises(UserError, match=r"broken.pt was made with other settings"):
        Run("bucket_sort", "kerple_log", 2, settings, CPU, tmp_path / "broken.pt")
    (tmp_path / "broken.pt").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"broken.pt holds no state of a run; remove it"):
        Run("bucket_sort", "kerple_log", 1, settings, CPU, tmp_path / "broken.pt")


def test_training_teaches_the_task(tmp_path):
    settings = Settings(**{**TINY, "steps": 250, "batch": 32, "learning_rate": 3e-3, "test_samples": 64})
    run = Run("bucket_sort", "kerple_log", 0, settings, CPU, tmp_path / "run.pt")
    untrained = run.accuracy(7)
    losses = []
    run.train(lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.6 * losses[0]
    assert run.accuracy(7) > untrained + 0.2


def arguments(folder, *words, **settings):
    options = [word for name, value in {**TINY, **settings}.items() for word in (f"--{name}", str(value))]
    return ["--output", str(folder), *options, *words]


def chomsky(*words):
    command = [sys.executable, "tools/chomsky.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


def test_command_runs_what_is_missing_and_reports(tmp_path, capsys):
    words = ("--tasks", "even_pairs", "binary_addition", "--methods", "none", "dape_kerple", "--seeds", "0", "1")
    first = chomsky(*arguments(tmp_path, *words))
    assert first.returncode == 0, first.stderr
    assert "8 runs on cpu, 0 of them done before" in first.stdout
    stored = json.loads((tmp_path / "chomsky.json").read_text())
    assert len(stored["results"]) == 8
    for one in stored["results"]:
        assert list(one["accuracies"]) == ["7", "8", "9"]
        assert one["score"] == pytest.approx(sum(one["accuracies"].values()) / 3)
    text = (tmp_path / "chomsky.md").read_text()
    assert "| level | task | none | dape_kerple |" in text
    assert "| context-sensitive | binary addition |" in text
    assert (tmp_path / "chomsky.png").read_bytes()[:4] == b"\x89PNG"
    assert not list((tmp_path / "unfinished").iterdir())

    main(arguments(tmp_path, *words))
    assert "8 of them done before" in capsys.readouterr().out
    assert json.loads((tmp_path / "chomsky.json").read_text()) == stored

    with pytest.raises(UserError, match=r"other settings \(steps 6, not 7\)"):
        main(arguments(tmp_path, *words, steps=7))


def test_its_own_methods_are_not_refused():
    for name in METHODS:
        check_method(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "dape_v2"), "dape_v2 is defined over the keys before a query"),
        (("--methods", "xpos"), "xpos is defined over the keys before a query"),
        (("--test-longest", "6"), r"test_longest \(6\) must be beyond train_longest \(6\)"),
        (("--num-heads", "3"), "hidden_size 16 is no multiple of num_heads 3"),
    ],
)
def test_bad_options_are_refused(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        main(arguments(tmp_path / "results", *words))


def test_an_unknown_task_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(arguments(tmp_path, "--tasks", "sorting"))
    assert "invalid choice: 'sorting'" in capsys.readouterr().err


def test_an_error_is_one_line(tmp_path):
    done = chomsky(*arguments(tmp_path, "--methods", "kerple_lgo"))
    assert done.returncode != 0
    assert "did you mean kerple_log" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
