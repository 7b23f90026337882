"""Validation during training, and extrapolation curves."""

import copy
import math
import os
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.evaluation import evaluate_extrapolation
from megatron.inference import load_model
from megatron.training.validation import in_context_score, perplexity
from tests.support.corpora import part_tokens
from tests.support.errors import assert_rejected
from tests.support.language_models import random_tokens, small_gpt
from tests.support.methods import methods_and_variants
from tests.support.runs import metrics, trained, unwrapped, weights

LENGTHS = [16, 32, 128]
CURVES = {"extrapolation_lengths": LENGTHS, "extrapolation_tokens": 1100}
TOKENS = 1024  # the largest multiple of 128 below that


def checkpoint_losses(folder, data_path, iteration):
    """Length -> loss of the checkpoint of that iteration."""
    model, _ = load_model(folder / "checkpoints", iteration=iteration)
    tokens = part_tokens(data_path, "8,1,1")
    assert len(tokens) > 1101  # the budget takes a part of it
    rows = evaluate_extrapolation(model, tokens, LENGTHS, token_budget=1100, progress=False)
    assert {row["tokens"] for row in rows} == {TOKENS}
    return {row["length"]: row["loss"] for row in rows}


def test_curves_equal_those_of_the_checkpoints_and_do_not_change_the_run(
    tmp_path, data_path, wandb_offline, capsys
):
    keys = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "precision": "fp32"}
    plain, curves = tmp_path / "plain", tmp_path / "curves"
    trained(plain, data_path, **keys)
    capsys.readouterr()
    tracked = {"tensorboard_dir": str(tmp_path / "tensorboard"), "use_wandb": True}
    trained(curves, data_path, **keys, **tracked, **CURVES)
    output = capsys.readouterr().out

    # Equal bit for bit: the evaluation does not use the random generators that dropout uses.
    assert metrics(curves) == metrics(plain)
    assert metrics(curves, "validation/loss") == metrics(plain, "validation/loss")
    with_curves = weights(curves, 6)
    assert all(torch.equal(with_curves[name], tensor) for name, tensor in weights(plain, 6).items())

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    wandb = b"".join(path.read_bytes() for path in wandb_offline.glob("offline-run-*/*.wandb"))
    losses = {iteration: checkpoint_losses(curves, data_path, iteration) for iteration in (3, 6)}
    for length in LENGTHS:
        written = {
            event.step: event.value for event in events.Scalars(f"extrapolation/loss/{length}")
        }
        assert written == pytest.approx(
            {step: by_length[length] for step, by_length in losses.items()}, abs=1e-5
        )
        assert metrics(curves, f"extrapolation/loss/{length}") == pytest.approx(written)
        assert events.Scalars(f"extrapolation/perplexity/{length}")
        assert f"extrapolation/perplexity/{length}".encode() in wandb
    assert f"on the same {TOKENS:,} tokens at every length" in unwrapped(output)
    console = output.replace("\n  ", " | ")  # lines that did not fit
    lines = re.findall(
        r"extrapolation at iteration (\d) \| perplexity at 16: (\S+) \| 32: \S+ \| 128: \S+ \| ",
        console,
    )
    assert [int(step) for step, _ in lines] == [3, 6]
    first = metrics(curves, "extrapolation/perplexity/16")
    assert [float(value) for _, value in lines] == pytest.approx(list(first.values()), abs=1e-3)

    # The in-context score, for at least 64 positions.
    model, _ = load_model(curves / "checkpoints", iteration=6)
    records = []
    options = {"token_budget": 1100, "position_bins": 128, "progress": False}
    evaluate_extrapolation(
        model, part_tokens(data_path, "8,1,1"), [128], **options, on_record=records.append
    )
    by_position = records[1]["losses"]
    expected = sum(by_position[96:]) / 32 - sum(by_position[8:32]) / 24
    assert metrics(curves, "extrapolation/in_context_score/128")[6] == pytest.approx(
        expected, abs=1e-5
    )
    assert not metrics(curves, "extrapolation/in_context_score/32")


def test_without_validation_the_curves_are_measured_at_the_end(tmp_path, data_path, capsys):
    keys = {
        "eval_iters": 0,
        "eval_interval": 4,
        "train_iters": 5,
        "save": None,
        "load": None,
        **CURVES,
    }
    trained(tmp_path, data_path, **keys)
    assert list(metrics(tmp_path, "extrapolation/loss/128")) == [4, 5]
    assert "validation at" not in unwrapped(capsys.readouterr().out)


def test_an_unsupported_length_has_no_curve(tmp_path, data_path, capsys):
    """One configuration file works for all methods."""
    keys = {"pos_emb": "learned", "train_iters": 4, "save": None, "load": None, **CURVES}
    trained(tmp_path, data_path, **keys)
    assert list(metrics(tmp_path, "extrapolation/loss/32")) == [3, 4]
    assert not metrics(tmp_path, "extrapolation/loss/128")
    console = unwrapped(capsys.readouterr().out)
    assert console.count("extrapolation at length 128: n/a: learned positions end at 31") == 1
    assert console.count("128: n/a | ") == 2


def test_lengths_that_do_not_divide_the_longest(tmp_path, data_path, capsys):
    keys = {
        "extrapolation_lengths": [32, 48],
        "extrapolation_tokens": 500,
        "eval_iters": 0,
        "train_iters": 3,
    }
    trained(tmp_path, data_path, **keys)
    assert "the same 480 tokens" in unwrapped(capsys.readouterr().out)
    model, _ = load_model(tmp_path / "checkpoints")
    rows = evaluate_extrapolation(
        model, part_tokens(data_path, "8,1,1"), [32, 48], token_budget=500, progress=False
    )
    for row in rows:
        assert metrics(tmp_path, f"extrapolation/loss/{row['length']}") == pytest.approx(
            {3: row["loss"]}, abs=1e-5
        )


def test_a_validation_text_that_is_too_short_is_an_error(tmp_path, data_path):
    message = r"text_document.*1,608.*32, 4096.*4,097"
    assert_rejected(message, trained, tmp_path, data_path, extrapolation_lengths=[32, 4096])
    assert not os.path.exists(tmp_path / "checkpoints")


@pytest.mark.parametrize("pos_emb", methods_and_variants())
def test_training_after_an_evaluation(pos_emb):
    """Cached tables must not come from the inference mode of the evaluation."""
    tokens = random_tokens(33)
    fresh = small_gpt(pos_emb).train()
    gradients = []
    for evaluated in (False, True):
        model = copy.deepcopy(fresh)
        if evaluated:
            evaluate_extrapolation(model, tokens, [8, 32], progress=False)
            assert model.training
        model.loss(tokens[None, :-1], tokens[None, 1:]).backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[1][name], gradient) for name, gradient in gradients[0].items())


def test_train_iters_0_validates_at_another_length(tmp_path, data_path, capsys):
    """As KERPLE was evaluated: a trained model, `train-iters: 0`, and `seq-length-val`."""
    trained(tmp_path, data_path)
    capsys.readouterr()
    keys = {"train_iters": 0, "seq_length_val": 128, "eval_iters": 2, "save": None}
    trained(tmp_path, data_path, **keys, log_dir=str(tmp_path / "long" / "logs"))
    assert "length 128" in unwrapped(capsys.readouterr().out)
    ((iteration, loss),) = metrics(tmp_path / "long", "validation/loss").items()
    assert iteration == 6
    assert 1.0 < loss < metrics(tmp_path)[1]


def test_perplexities_are_finite():
    assert perplexity(2.0) == math.exp(2.0)
    assert perplexity(1e6) == perplexity(700.0) < math.inf


def test_in_context_scores_need_64_positions():
    losses = [9.0] * 8 + [5.0] * 24 + [7.0] * 16 + [2.0] * 16
    assert in_context_score(losses) == -3.0
    assert in_context_score(losses[:-1]) is None
