"""Saved in one parallel layout, resumed in any other: the losses of the unbroken run, optimizer's state included."""

import pytest
import torch

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import go_back, metrics, training_settings, weights

LAYOUTS = {
    "one": {},
    "data": {"num_gpus": 2},
    "zero-1": {"num_gpus": 2, "zero_optimization": {"stage": 1}},
    "zero-2": {"num_gpus": 2, "zero_optimization": {"stage": 2}},
    "zero-3": {"num_gpus": 2, "zero_optimization": {"stage": 3}},
    "pipeline": {"num_gpus": 2, "pipe_parallel_size": 2, "gradient_accumulation_steps": 2},
    "tensor": {"num_gpus": 2, "model_parallel_size": 2},
}
# Every layout is saved from and resumed in, and every one of them meets a quite different one.
PAIRS = [
    ("one", "tensor"),
    ("tensor", "pipeline"),
    ("pipeline", "zero-2"),
    ("zero-2", "one"),
    ("data", "pipeline"),
    ("zero-1", "tensor"),
    ("tensor", "zero-3"),
    ("zero-3", "data"),
    ("pipeline", "zero-1"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, data_path, ranks):
    """Layout -> the folder of an unbroken run, made when it is first asked for."""
    made = {}

    def give(layout, **keys):
        name = (layout, *keys.items())
        if name not in made:
            made[name] = tmp_path_factory.mktemp(layout)
            trained(ranks, layout, training_settings(made[name], data_path, **LAYOUTS[layout], **keys))
        return made[name]

    return give


def trained(ranks, layout, settings):
    settings["padded_vocab_size"] = 512
    if layout == "one":
        train(Config.from_flat(settings))
        return ""
    return ranks.train(settings)


def resume(ranks, saved, source, target, folder, data_path, **keys):
    go_back(saved(source, **keys), folder, 3)
    output = trained(ranks, target, training_settings(folder, data_path, **LAYOUTS[target], **keys))
    whole = metrics(saved("one", **keys))
    for name in ("train/loss", "train/grad_norm", "kernel/bias_p/mean", "kernel/bias_a/max"):
        after = {step: value for step, value in metrics(saved("one", **keys), name).items() if step > 3}
        assert metrics(folder, name) == pytest.approx(after, abs=1e-4 if keys == {} else 3e-2), name
    assert list(whole) == [1, 2, 3, 4, 5, 6]
    assert metrics(folder, "validation/loss")[6] == pytest.approx(
        metrics(saved("one", **keys), "validation/loss")[6], abs=1e-4 if keys == {} else 3e-2
    )
    return output


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_resumed_in_another_layout(source, target, ranks, saved, tmp_path, data_path):
    output = resume(ranks, saved, source, target, tmp_path, data_path)
    if target != "one":
        assert "resharding its state" in output


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_layout_resumes_every_other(source, target, ranks, saved, tmp_path, data_path):
    resume(ranks, saved, source, target, tmp_path, data_path)


def test_zero_3_gathers_the_kernels_it_has_cut(ranks, saved, tmp_path, data_path):
    """By default parameters of a few elements are left whole; at a threshold of 0 each rank holds half of every one."""
    cut = {"num_gpus": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    trained(ranks, "zero-3", training_settings(tmp_path, data_path, **cut))
    for name in ("train/loss", "kernel/bias_p/mean", "kernel/bias_a/max"):
        assert metrics(tmp_path, name) == pytest.approx(metrics(saved("one"), name), abs=1e-4), name
    whole, gathered = (weights(folder, 6) for folder in (saved("one"), tmp_path))
    assert whole.keys() == gathered.keys()
    assert all(torch.allclose(gathered[name], tensor, atol=1e-3) for name, tensor in whole.items())
