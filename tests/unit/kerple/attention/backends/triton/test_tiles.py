"""The choice of tiles for each GPU, and which GPUs are rejected."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention.backends.triton import kernels, tiles
from kerple.attention.backends.triton.tiles import Gpu, tiles_for
from kerple.attention.call import Requirements
from kerple.attention.dispatch import BACKENDS

GPUS = [Gpu("Hopper", 90, 227 * 1024)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_suit_the_kernels(gpu, dtype):
    for size in (8, 64, 128):
        for weight in (False, True):
            chosen = tiles_for(gpu, dtype, size, weight=weight)
            assert chosen.tables.queries == chosen.tables.keys
            for tile in vars(chosen).values():
                assert tile.queries + tile.keys <= kernels.MARGIN
                assert tiles.ROWS % tile.queries == 0


def test_shared_memory_of_the_device_is_checked(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="RTX 4090", major=8, minor=9, shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    small, large = (
        Requirements(dtype=torch.bfloat16, head_size=size, device=torch.device("cuda")) for size in (64, 128)
    )
    assert BACKENDS["fused"].unsupported_reason(small) is None
    assert "needs 131072 bytes of shared memory" in BACKENDS["fused"].unsupported_reason(large)
