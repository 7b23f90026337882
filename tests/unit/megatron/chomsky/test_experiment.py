"""Training and testing of encoders, and stored results."""

import pytest
import torch

from megatron.chomsky.experiment import (
    EncoderExperiment,
    ExperimentSettings,
    read_chomsky_results,
    write_chomsky_results,
)
from megatron.utils.errors import UserError
from tests.support.errors import assert_rejected

TINY = ExperimentSettings(
    steps=6,
    batch=4,
    train_longest=6,
    test_longest=9,
    test_samples=4,
    num_layers=2,
    hidden_size=16,
    num_heads=2,
)


def experiment(seed=1, **settings):
    settings = ExperimentSettings(**{**vars(TINY), **settings})
    return EncoderExperiment("bucket_sort", "kerple_log", seed, settings, torch.device("cpu"))


def test_equal_seeds_give_equal_weights():
    first, second = (experiment(architecture="original") for _ in range(2))
    for learner in (first, second):
        learner.train(lambda step, loss: None)
    other = second.model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in first.model.state_dict().items())


def test_parameters_stay_within_their_bounds():
    learner = experiment(learning_rate=1.0)
    learner.train(lambda step, loss: None)
    kernel = {
        name: value
        for name, value in learner.model.named_parameters()
        if "bias_p" in name or "bias_a" in name
    }
    assert kernel
    assert all(value.min() >= 0.01 - 1e-9 for value in kernel.values())


@pytest.mark.ci
def test_training_learns_the_task():
    learner = experiment(seed=0, steps=120, batch=32, learning_rate=2e-3, test_samples=64)
    untrained = learner.accuracy(7)
    losses = []
    learner.train(lambda step, loss: losses.append(loss))
    # Single batches vary with their lengths, and rounding differs between CPUs.
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    result = learner.test(lambda tested, length: None)
    assert result["accuracies"]["7"] == learner.accuracy(7) > untrained + 0.2
    assert list(result["accuracies"]) == ["7", "8", "9"]
    assert result["score"] == pytest.approx(sum(result["accuracies"].values()) / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_longest": 6}, "test_longest.*6.*train_longest"),
        ({"num_heads": 3}, "hidden_size 16.*num_heads 3"),
        ({"test_every": 0}, "test_longest.*9.*train_longest.*6.*test_every.*0"),
    ],
)
def test_invalid_settings(settings, message):
    assert_rejected(message, ExperimentSettings, **{**vars(TINY), **settings})


def test_doublings_of_the_training_length_are_tested():
    learner = experiment(test_every=0, test_longest=30)
    result = learner.test(lambda tested, length: None)
    assert list(result["accuracies"]) == ["6", "12", "24"]
    assert result["score"] == pytest.approx(
        (result["accuracies"]["12"] + result["accuracies"]["24"]) / 2
    )


def test_stored_results(tmp_path):
    path = tmp_path / "chomsky.json"
    assert read_chomsky_results(path, TINY) == []
    accuracies = {"7": 0.25, "8": 0.5, "9": 0.75}
    result = {
        "task": "even_pairs",
        "pos_emb": "none",
        "seed": 0,
        "score": 0.5,
        "accuracies": accuracies,
    }
    write_chomsky_results(path, TINY, [result])
    assert read_chomsky_results(path, TINY) == [result]
    with pytest.raises(UserError, match=r"other settings \(steps 6, not 7\)"):
        read_chomsky_results(path, ExperimentSettings(**{**vars(TINY), "steps": 7}))
    write_chomsky_results(path, TINY, [result, {**result, "score": 1.5}])
    assert_rejected(r"chomsky\.json: results\[1\]\.score.*1\.5", read_chomsky_results, path, TINY)
    write_chomsky_results(path, TINY, [result, {**result, "score": 0.75}])
    assert_rejected(r"chomsky\.json: results\[1\]\.score 0\.75", read_chomsky_results, path, TINY)
    path.write_text("[]")
    assert_rejected(r"chomsky\.json", read_chomsky_results, path, TINY)
