"""The method of the experiment on bytes that tests a mechanism."""

import torch

from kerple.positional import Alibi, load_plugin, registry
from kerple.positional.registry import method_class


def test_it_starts_at_the_slopes_of_alibi(monkeypatch):
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    load_plugin("experiments/bytes/steep.py")
    method = method_class("kerple_log_steep")(num_heads=6)
    distances = torch.tensor([0.0, 1e-3])
    expected = Alibi(num_heads=6).bias(distances)
    torch.testing.assert_close(method.bias(distances).detach(), expected, rtol=1e-4, atol=0)
    assert {name for name, _ in method.named_parameters()} == {"bias_p", "bias_a"}
