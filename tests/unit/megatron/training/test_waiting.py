"""Training does not wait for the device between two lines of the log."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import Config
from megatron.training.engine import Engine
from megatron.training.loop import train
from tests.support.runs import metrics, training_settings

# What a host reads values by: item(), int(), float(), bool() and `if` end in the first. Copies to a CPU cannot be seen
# on one.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class Reads(TorchDispatchMode):
    """The operators that have read values."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        if operator in READS:
            self.found.append(str(operator))
        return operator(*arguments, **(keywords or {}))


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
@pytest.mark.parametrize(("pos_emb", "backend"), [("kerple_bias_wht", "reference"), ("rpe", "sdpa")])
def test_no_step_reads_a_tensor(pos_emb, backend, precision, tmp_path, data_path, monkeypatch):
    """With clipping and accumulation. The backends are those that treat a CPU as any device; batches come before, for
    they are read on the host.
    """
    step, reads = Engine.train_step, []

    def watched(engine, batches, *arguments):
        taken = [next(batches) for _ in range(engine.accumulation)]
        with Reads() as watch:
            loss = step(engine, iter(taken), *arguments)
        reads.append(watch.found)
        return loss

    monkeypatch.setattr(Engine, "train_step", watched)
    keys = {"pos_emb": pos_emb, "attention_backend": backend, "precision": precision, "gradient_clipping": 0.5}
    settings = training_settings(tmp_path, data_path, gradient_accumulation_steps=2, save=None, load=None, **keys)
    train(Config.from_flat(settings))
    assert reads == [[]] * 6
    assert all(norm > 0.5 for norm in metrics(tmp_path, "train/grad_norm").values())  # it did clip


def test_the_watch_sees_a_reading_host():
    for read in (torch.Tensor.item, bool, float, lambda one: torch.equal(one, one)):
        with Reads() as watch:
            read(torch.ones(()))
        assert watch.found, read


def test_deepspeed_s_clock_does_not_wait(tmp_path, data_path, monkeypatch):
    """It would not on a CPU either way: what it calls is counted."""
    from deepspeed.accelerator import get_accelerator

    waits = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append(1))
    settings = training_settings(tmp_path, data_path, save=None, load=None, eval_iters=0, precision="bfloat16")
    train(Config.from_flat(settings))
    assert not waits


def test_a_bfloat16_step_with_a_gradient_that_is_not_finite_is_skipped(tmp_path, data_path, monkeypatch):
    """Weights, masters and averages stay; the next step goes on."""
    step, kept = Engine.train_step, []

    def state(engine):
        optimizer = engine.engine.optimizer
        averages = [value for one in optimizer.optimizer.state.values() for value in one.values()]
        return [
            value.clone() for value in (*engine.model.parameters(), *optimizer.fp32_groups_flat_partition, *averages)
        ]

    def broken(engine, batches, rate, iteration):
        before = state(engine)
        weight = next(engine.model.parameters())
        factor = float("nan") if iteration == 3 else 1.0
        handle = weight.register_hook(lambda gradient: gradient * factor)
        loss = step(engine, batches, rate, iteration)
        handle.remove()
        after = state(engine)
        kept.append(len(before) == len(after) and all(map(torch.equal, before, after)))
        return loss

    monkeypatch.setattr(Engine, "train_step", broken)
    train(Config.from_flat(training_settings(tmp_path, data_path, save=None, load=None, precision="bfloat16")))
    assert kept == [iteration == 3 for iteration in range(6)]
    norms = metrics(tmp_path, "train/grad_norm")
    assert [math.isinf(norm) for norm in norms.values()] == kept
    assert all(math.isfinite(loss) for loss in metrics(tmp_path).values())
