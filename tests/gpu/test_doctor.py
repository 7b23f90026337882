"""The doctor on a simulated CUDA device: no tensor is on the wrong device. Simulated tensors have no values, so the
printed errors are meaningless.
"""

import pytest
import torch

from kerple import doctor
from kerple.positional import primary_names
from tests.support.simulated_cuda import SimulatedCuda, move_to_cuda

MODIFYING = [name for name in primary_names() if name.startswith(("dape", "fire", "cope", "tr"))]
QUICK = ("dape_kerple", "cope", "fire")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODIFYING]
)
def test_methods_that_fused_does_not_support(name, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: move_to_cuda(module, None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Simulated")
    with SimulatedCuda():
        check = doctor.check_method(name, torch.device("cuda"), torch.bfloat16, 64)
    assert check.backends == ["chunked"]
    assert check.unsupported == "does not support positional methods with modify_scores"
    assert set(check.errors) == {"result", "query", "key", "value"}
