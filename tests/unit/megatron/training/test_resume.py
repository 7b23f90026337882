"""Stopping and going on: the losses and the weights of a run that did not stop, bit for bit."""

import signal

import pytest
import torch

from megatron.checkpoint.directory import saved_iterations
from megatron.config import Config, UserError
from megatron.training.loop import train
from tests.support.runs import go_back, metrics, start, training_settings, weights


def trained(folder, data_path, **keys):
    """Train in this process; returns the folder."""
    train(Config.from_flat(training_settings(folder, data_path, **keys)))
    return folder


def assert_same_end(resumed, whole):
    after = {step: loss for step, loss in metrics(whole).items() if step > 3}
    assert metrics(resumed) == after
    assert metrics(resumed, "validation/loss")[6] == metrics(whole, "validation/loss")[6]
    ours, theirs = weights(resumed, 6), weights(whole, 6)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("precision", ["fp32", "bfloat16", "fp16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_resumed_run_equals_the_unbroken_one(precision, dropout, tmp_path, data_path):
    keys = {"precision": precision, "hidden_dropout": dropout, "gradient_accumulation_steps": 2}
    whole = trained(tmp_path / "whole", data_path, **keys)
    go_back(whole, tmp_path / "resumed", 3)
    assert_same_end(trained(tmp_path / "resumed", data_path, **keys), whole)


@pytest.mark.parametrize(
    "layout",
    [
        {"pipe_parallel_size": 2},
        {"model_parallel_size": 2, "padded_vocab_size": 512},
        {"zero_optimization": {"stage": 2}},
    ],
    ids=["pipeline", "tensor", "zero-2"],
)
def test_two_ranks_resume_exactly(layout, ranks, tmp_path, data_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ranks.train(training_settings(whole, data_path, num_gpus=2, **layout))
    go_back(whole, resumed, 3)
    output = ranks.train(training_settings(resumed, data_path, num_gpus=2, **layout))
    assert "iteration 3" in output
    assert_same_end(resumed, whole)


def test_sigterm_saves_and_leaves(tmp_path, data_path):
    """What SLURM does before it takes the machine away."""
    settings = training_settings(tmp_path, data_path, train_iters=100_000, save_interval=None, eval_iters=0, num_gpus=2)
    process = start(tmp_path, settings)
    for line in process.stdout:
        if "iteration 5/" in line:
            process.send_signal(signal.SIGTERM)
            break
    output = process.communicate(timeout=120)[0]
    assert "received a signal to stop" in output, output
    (iteration,) = saved_iterations(tmp_path / "checkpoints")
    assert 5 <= iteration < 100_000
    state = trained(tmp_path, data_path, train_iters=iteration, load=None, save=None)
    assert metrics(state)[iteration] == pytest.approx(metrics(tmp_path)[iteration], abs=1e-4)


def test_finished_run_is_not_trained_again(tmp_path, data_path, capsys):
    trained(tmp_path, data_path)
    before = weights(tmp_path, 6)
    trained(tmp_path, data_path)
    assert "iteration 6" in capsys.readouterr().out
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path, 6).items())


def test_longer_run_goes_on(tmp_path, data_path):
    trained(tmp_path, data_path)
    trained(tmp_path, data_path, train_iters=8)
    assert list(metrics(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert saved_iterations(tmp_path / "checkpoints") == [3, 6, 8]


def test_finetuning_takes_the_weights_and_nothing_else(tmp_path, data_path):
    trained(tmp_path / "first", data_path)
    keys = {"load": str(tmp_path / "first" / "checkpoints"), "finetune": True, "log_interval": 1}
    trained(tmp_path / "tuned", data_path, **keys)
    first, tuned = metrics(tmp_path / "first"), metrics(tmp_path / "tuned")
    assert list(tuned) == [1, 2, 3, 4, 5, 6]
    assert tuned[1] < first[1] - 0.5
    with pytest.raises(UserError, match="finetune"):
        trained(tmp_path / "none", data_path, load=str(tmp_path / "nothing"), finetune=True)


def test_iteration_names_the_checkpoint_to_load(tmp_path, data_path):
    trained(tmp_path, data_path)
    expected = metrics(tmp_path)
    trained(tmp_path, data_path, iteration=3, save=None, log_dir=str(tmp_path / "again" / "logs"))
    assert metrics(tmp_path / "again") == {step: expected[step] for step in (4, 5, 6)}
    with pytest.raises(UserError, match=r"iteration 4.*3, 6"):
        trained(tmp_path, data_path, iteration=4)


def test_older_checkpoints_are_removed(tmp_path, data_path):
    trained(tmp_path, data_path, save_interval=1, keep_last_n_checkpoints=2)
    assert saved_iterations(tmp_path / "checkpoints") == [5, 6]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step6"


def test_optimizer_may_be_left_out(tmp_path, data_path, capsys):
    trained(tmp_path, data_path, no_save_optim=True)
    trained(tmp_path, data_path, train_iters=7, no_save_optim=False)
    assert "optimizer state not loaded: it was not saved" in capsys.readouterr().out
    assert not list((tmp_path / "checkpoints/global_step6").glob("optimizer_*"))
    assert list((tmp_path / "checkpoints/global_step7").glob("optimizer_*"))
