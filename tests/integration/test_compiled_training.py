"""Training with `torch-compile`: the losses and checkpoints of uncompiled training."""

import pytest

from megatron.config import Config
from megatron.training.loop import train
from tests.support.runs import copy_checkpoint, metrics, training_settings


@pytest.mark.slow
def test_compiled_and_uncompiled_runs_resume_each_other(tmp_path, data_path, empty_inductor_cache, capsys):
    """With ZeRO 2, gradient accumulation and recomputed activations. All runs have the same losses."""
    keys = {"checkpoint_activations": True, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}

    def run(name: str, *, compiled: bool) -> None:
        train(Config.from_flat(training_settings(tmp_path / name, data_path, torch_compile=compiled, **keys)))

    run("eager", compiled=False)
    assert "torch.compile" not in capsys.readouterr().out
    run("compiled", compiled=True)
    assert capsys.readouterr().out.count("torch.compile: blocks are compiled for training, except attention") == 1
    copy_checkpoint(tmp_path / "eager", tmp_path / "resumed compiled", 3)
    run("resumed compiled", compiled=True)
    copy_checkpoint(tmp_path / "compiled", tmp_path / "resumed eager", 3)
    run("resumed eager", compiled=False)
    for name in ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean"):
        expected = metrics(tmp_path / "eager", name)
        for folder in ("compiled", "resumed compiled", "resumed eager"):
            values = metrics(tmp_path / folder, name)
            assert values == pytest.approx({step: expected[step] for step in values}, rel=1e-4), (folder, name)
