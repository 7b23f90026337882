"""Two real ranks against one: the same losses, the same kernel parameters, whatever the layout."""

import signal

import psutil
import pytest
import torch

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import metrics, run, start, training_settings, weights

LAYOUTS = {
    "data": {"num_gpus": 2},
    "pipeline": {"num_gpus": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
    "tensor": {"num_gpus": 2, "model_parallel_size": 2, "padded_vocab_size": 512},
    "zero-1": {"num_gpus": 2, "zero_optimization": {"stage": 1}},
    "zero-2": {"num_gpus": 2, "zero_optimization": {"stage": 2}},
    "zero-3": {"num_gpus": 2, "zero_optimization": {"stage": 3}},
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, data_path):
    folder = tmp_path_factory.mktemp("one")
    train(Config.from_flat(training_settings(folder, data_path)))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one(layout, one_rank, ranks, tmp_path, data_path):
    """One layout as a user starts it, the others in ranks that are there."""
    settings = training_settings(tmp_path, data_path, **LAYOUTS[layout])
    output = run(tmp_path, settings) if layout == "data" else ranks.train(settings)
    assert "2 ranks on cpu" in output
    for name in ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean", "kernel/bias_a/max"):
        ours, theirs = metrics(tmp_path, name), metrics(one_rank, name)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, abs=1e-4), name
    if layout != "tensor":
        ours, theirs = weights(tmp_path, 6), weights(one_rank, 6)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-4, rtol=0, msg=name)


def test_kernel_parameters_stay_one_in_every_stage(ranks, tmp_path, data_path):
    """Each stage saves a copy with each of its layers; they must not drift apart. The embedding is tied here too."""
    ranks.train(training_settings(tmp_path, data_path, **LAYOUTS["pipeline"], no_weight_tying=False))
    saved = weights(tmp_path, 6)
    for parameter in ("bias_p", "bias_a"):
        copies = [tensor for name, tensor in saved.items() if name.endswith(f"attention.rpe.{parameter}")]
        assert len(copies) == 2
        assert torch.equal(*copies)
    start = weights(tmp_path, 3)
    assert not torch.equal(*(w["layer_02-model_00-model_states.pt/attention.rpe.bias_p"] for w in (start, saved)))
    assert not any("final_linear" in name for name in saved)


def test_tied_embeddings_train_as_on_one_rank(ranks, tmp_path, data_path):
    train(Config.from_flat(training_settings(tmp_path / "one", data_path, no_weight_tying=False)))
    ranks.train(training_settings(tmp_path / "two", data_path, **LAYOUTS["pipeline"], no_weight_tying=False))
    assert metrics(tmp_path / "one") == pytest.approx(metrics(tmp_path / "two"), abs=1e-4)


@pytest.mark.parametrize(
    ("pos_emb", "options", "parameter"),
    [("kerple_log", {}, "bias_a"), ("rpe", {"num_buckets": 8, "max_distance": 20}, "weight")],
)
def test_fused_kernels_on_two_tensor_parallel_ranks(pos_emb, options, parameter, ranks, tmp_path, data_path):
    """Each rank adds up the gradients of its own heads; T5's in two ways."""
    keys = {
        "pos_emb": pos_emb,
        "pos_emb_options": options,
        "padded_vocab_size": 512,
        "train_batch_size": 1,
        "train_iters": 2,
        "eval_interval": 2,
        "save_interval": 1,
        # Steps as large as gradients are: Adam's usual ones would hide a factor.
        "optimizer": {"type": "Adam", "params": {"lr": 1.0, "eps": 1.0}},
    }
    train(Config.from_flat(training_settings(tmp_path / "one", data_path, **keys)))
    keys.update(LAYOUTS["tensor"], attention_backend="fused")
    assert "fused (as configured)" in ranks.train(training_settings(tmp_path / "two", data_path, **keys))
    name = f"layer_02-model_00-model_states.pt/attention.rpe.{parameter}"
    steps = [weights(tmp_path / run, 2)[name] - weights(tmp_path / run, 1)[name] for run in ("one", "two")]
    assert steps[0].flatten().count_nonzero() > steps[0].numel() / 2
    torch.testing.assert_close(*steps, rtol=1e-3, atol=1e-7)
    assert metrics(tmp_path / "two", "train/grad_norm") == pytest.approx(
        metrics(tmp_path / "one", "train/grad_norm"), rel=1e-4
    )


def test_ranks_that_do_not_fit_are_refused(tmp_path, data_path):
    output = run(tmp_path, training_settings(tmp_path, data_path, num_gpus=3, pipe_parallel_size=2), status=2)
    assert "3 ranks cannot be divided" in output or "num_gpus" in output
    assert "Traceback" not in output


def test_signal_to_one_rank_stops_all(tmp_path, data_path):
    """The ranks agree to stop; none goes on to the final evaluation alone."""
    settings = training_settings(tmp_path, data_path, train_iters=100_000, save_interval=None, num_gpus=2)
    process = start(tmp_path, {**settings, "eval_interval": 50_000})
    for line in process.stdout:
        if "iteration 5/" in line:
            break
    ranks = [
        child for child in psutil.Process(process.pid).children(recursive=True) if "--local_rank=1" in child.cmdline()
    ]
    ranks[-1].send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert "received a signal to stop; checkpoint saved" in output
    assert "validation at" not in output
