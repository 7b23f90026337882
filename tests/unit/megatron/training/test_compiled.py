"""Training with compiled blocks: the losses and checkpoints of a run without."""

import pytest
import torch

from megatron.config import Config, UserError
from megatron.training.loop import train
from tests.support.runs import go_back, metrics, run, training_settings


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What is compiled here is compiled anew; once, all tests having blocks and micro-batches of the same sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def test_a_run_goes_on_from_the_other_kind_s_checkpoint(tmp_path, data_path):
    """Compiled from one that was not, and back: the losses of a run that never changed."""
    keys = {"checkpoint_activations": True, "gradient_accumulation_steps": 2}
    train(Config.from_flat(training_settings(tmp_path / "eager", data_path, **keys)))
    train(Config.from_flat(training_settings(tmp_path / "compiled", data_path, torch_compile=True, **keys)))
    for start, going_on in (("eager", True), ("compiled", False)):
        go_back(tmp_path / start, tmp_path / f"from {start}", 3)
        settings = training_settings(tmp_path / f"from {start}", data_path, torch_compile=going_on, **keys)
        train(Config.from_flat(settings))
    for name in ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean"):
        expected = metrics(tmp_path / "eager", name)
        for folder, steps in (("compiled", (3, 6)), ("from eager", (6,)), ("from compiled", (6,))):
            found = metrics(tmp_path / folder, name)
            assert [found[step] for step in steps] == pytest.approx([expected[step] for step in steps], rel=1e-4), name


def test_the_entry_point_with_zero_2(tmp_path, data_path):
    keys = {"zero_optimization": {"stage": 2}, "save": None, "load": None, "gradient_accumulation_steps": 2}
    train(Config.from_flat(training_settings(tmp_path / "eager", data_path, **keys)))
    output = run(tmp_path / "compiled", training_settings(tmp_path / "compiled", data_path, torch_compile=True, **keys))
    assert output.count("torch.compile: transformer blocks in training, without attention") == 1
    for name in ("train/loss", "train/grad_norm", "validation/loss", "kernel/bias_p/mean"):
        assert metrics(tmp_path / "compiled", name) == pytest.approx(metrics(tmp_path / "eager", name), abs=1e-4), name


def test_a_missing_compiler_is_one_clear_error(tmp_path, data_path, monkeypatch):
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing is compiled yet"))
    torch._dynamo.reset()
    with pytest.raises(
        UserError, match=r"torch_compile: .* not work on this machine .*C\+\+ compiler.*remove torch_comp"
    ):
        train(Config.from_flat(training_settings(tmp_path, data_path, torch_compile=True)))
    assert not (tmp_path / "checkpoints").exists()
