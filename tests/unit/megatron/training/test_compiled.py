"""Blocks compiled by torch.compile: the losses, gradients and checkpoints of those that are not."""

import pytest
import torch

from megatron.config import Config, UserError
from megatron.model.compiled import compile_blocks
from megatron.model.gpt import GPT
from megatron.model.initialization import initialize
from megatron.model.settings import ModelSettings
from megatron.training.loop import train
from tests.support.runs import go_back, metrics, run, training_settings


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """What is compiled here is compiled anew; once, all tests having blocks and micro-batches of the same sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def small_model(pos_emb: str, checkpoint_every: int, **keys: object) -> GPT:
    sizes = {"num_layers": 10, "hidden_size": 32, "num_heads": 4, "padded_vocab_size": 64, "max_positions": 32}
    settings = ModelSettings(**sizes, pos_emb=pos_emb, **keys)
    model = GPT(settings, checkpoint_every=checkpoint_every)
    initialize(model.layers(), settings, seed=1, init_method="normal", output_init_method="normal", std=0.1)
    return model


@pytest.mark.parametrize(
    ("pos_emb", "checkpoint_every"),
    [("kerple_log", 0), ("kerple_bias_wht", 1), ("rotary", 3), ("dape_kerple", 1), ("xpos", 0), ("sinusoidal", 0)],
)
def test_loss_and_gradients_are_those_of_the_model_that_is_not_compiled(pos_emb, checkpoint_every):
    """All ten layers are served by the few graphs of one."""
    eager, compiled = small_model(pos_emb, checkpoint_every), small_model(pos_emb, checkpoint_every)
    compile_blocks(compiled, torch.device("cpu"))
    assert list(compiled.state_dict()) == list(eager.state_dict())
    text = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    torch._dynamo.utils.counters.clear()
    for model in (eager, compiled):
        loss = model.loss(text[:, :-1], text[:, 1:])
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 10
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_recomputed_blocks_drop_the_same_places():
    text = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    results = []
    for checkpoint_every in (0, 1):
        model = small_model("kerple_log", checkpoint_every, hidden_dropout=0.2, attention_dropout=0.1)
        compile_blocks(model, torch.device("cpu"))
        torch.manual_seed(5)
        loss = model.loss(text[:, :-1], text[:, 1:])
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for found, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_an_evaluation_compiles_nothing():
    model = small_model("kerple_log", 0)
    compile_blocks(model, torch.device("cpu"))
    torch._dynamo.utils.counters.clear()
    tokens = torch.randint(64, (1, 5))
    with torch.no_grad():
        during = model(tokens)
    after = model.eval()(tokens)
    torch.testing.assert_close(during, after)
    assert not torch._dynamo.utils.counters["stats"]


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
