"""One step of a model in the dtype of a run."""

import pytest
import torch

from kerple.positional import KerpleLog, registry
from megatron.config import Config
from megatron.model.trial import trial_step
from tests.support.checkpoints import settings_of
from tests.support.methods import methods_and_variants


def model_config(pos_emb, **keys):
    return Config.from_flat(settings_of(pos_emb, "nowhere", **keys)).model


@pytest.mark.parametrize("name", methods_and_variants())
def test_methods_run_in_half_precision(name):
    for dtype in (torch.bfloat16, torch.float16):
        assert trial_step(model_config(name), dtype) == []


def test_gradients_that_are_not_finite_are_named(monkeypatch):
    class Root(KerpleLog):
        shared = False

        def bias(self, distance):
            return super().bias(distance) - (self.bias_a.abs().view(-1, 1) * distance).sqrt()

    class Logarithm(KerpleLog):
        def bias(self, distance):
            return super().bias(distance) - distance.log()

    monkeypatch.setitem(registry._METHODS, "root", Root)
    assert trial_step(model_config("root"), torch.float32) == ["the gradient of bias_a"]
    # A loss that is not finite has other causes, unless the method's values are not.
    monkeypatch.setitem(registry._METHODS, "logarithm", Logarithm)
    assert trial_step(model_config("logarithm"), torch.float32) == ["a bias"]
    assert (
        trial_step(model_config("root", init_method="normal", init_method_std=1e30), torch.float32)
        == []
    )
