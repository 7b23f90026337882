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
    steps=6, batch=4, train_longest=6, test_longest=9, test_samples=4, num_layers=2, hidden_size=16, num_heads=2
)


def experiment(state_file, seed=1, **settings):
    settings = ExperimentSettings(**{**vars(TINY), **settings})
    return EncoderExperiment("bucket_sort", "kerple_log", seed, settings, torch.device("cpu"), state_file)


def test_an_interrupted_experiment_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.chomsky.experiment.SAVE_SECONDS", 0.0)
    uninterrupted = experiment(tmp_path / "uninterrupted.pt", steps=20)
    uninterrupted.train(lambda step, loss: None)

    def interrupt(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment(tmp_path / "state.pt", steps=20).train(interrupt)
    resumed = experiment(tmp_path / "state.pt", steps=20)
    assert resumed.step == 9
    resumed.train(lambda step, loss: None)
    for name, value in uninterrupted.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert resumed.accuracy(9) == uninterrupted.accuracy(9)
    assert_rejected(r"state\.pt", experiment, tmp_path / "state.pt", seed=2, steps=20)
    (tmp_path / "state.pt").write_bytes(b"not a state")
    assert_rejected(r"state\.pt", experiment, tmp_path / "state.pt", steps=20)
    resumed.delete_state()
    assert not (tmp_path / "state.pt").exists()


def test_parameters_stay_within_their_bounds(tmp_path):
    learner = experiment(tmp_path / "state.pt", learning_rate=1.0)
    learner.train(lambda step, loss: None)
    kernel = {name: value for name, value in learner.model.named_parameters() if "bias_p" in name or "bias_a" in name}
    assert kernel
    assert all(value.min() >= 0.01 - 1e-9 for value in kernel.values())


@pytest.mark.ci
def test_training_learns_the_task(tmp_path):
    learner = experiment(tmp_path / "state.pt", seed=0, steps=120, batch=32, learning_rate=2e-3, test_samples=64)
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
    with pytest.raises(UserError, match=message):
        ExperimentSettings(**{**vars(TINY), **settings})


def test_doublings_of_the_training_length_are_tested(tmp_path):
    learner = experiment(tmp_path / "state.pt", test_every=0, test_longest=30)
    result = learner.test(lambda tested, length: None)
    assert list(result["accuracies"]) == ["6", "12", "24"]
    assert result["score"] == pytest.approx((result["accuracies"]["12"] + result["accuracies"]["24"]) / 2)


def test_stored_results(tmp_path):
    path = tmp_path / "chomsky.json"
    assert read_chomsky_results(path, TINY) == []
    accuracies = {"7": 0.25, "8": 0.5, "9": 0.75}
    result = {"task": "even_pairs", "pos_emb": "none", "seed": 0, "score": 0.5, "accuracies": accuracies}
    write_chomsky_results(path, TINY, [result])
    assert read_chomsky_results(path, TINY) == [result]
    with pytest.raises(UserError, match=r"other settings \(steps 6, not 7\)"):
        read_chomsky_results(path, ExperimentSettings(**{**vars(TINY), "steps": 7}))
    write_chomsky_results(path, TINY, [result, {**result, "score": 1.5}])
    assert_rejected(r"chomsky\.json: results\[1\]\.score.*1\.5", read_chomsky_results, path, TINY)
    path.write_text("[]")
    assert_rejected(r"chomsky\.json", read_chomsky_results, path, TINY)
