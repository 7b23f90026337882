"""The choice of tiles for each GPU, and which GPUs are rejected. tests/integration compiles the
kernels with them.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kerple.attention import ExpectedCalls, Requirements, attend, check_backend, describe_choice
from kerple.attention.backends.triton import kernels, tiles
from kerple.attention.backends.triton.tiles import Gpu, no_tiles_reason, tiles_for
from kerple.positional import ModelShape, build

A100, H100 = Gpu("A100", 80, 163 * 1024), Gpu("H100", 90, 227 * 1024)
RTX_3090, RTX_4090, RTX_5090 = (
    Gpu(f"RTX {name}", sm, 99 * 1024) for name, sm in ((3090, 86), (4090, 89), (5090, 120))
)
B200 = Gpu("B200", 100, 227 * 1024)
GPUS = [A100, RTX_3090, RTX_4090, H100, B200, RTX_5090]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture
def gpu_of_this_machine(monkeypatch):
    """A function that makes PyTorch report a GPU."""

    def report(gpu: Gpu) -> None:
        properties = SimpleNamespace(
            name=gpu.name,
            major=gpu.architecture // 10,
            minor=gpu.architecture % 10,
            shared_memory_per_block_optin=gpu.shared_memory,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    return report


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_suit_the_kernels(gpu, dtype):
    for size in (8, 64, 128):
        assert no_tiles_reason(gpu, dtype, size) is None
        for weight, grouped, documents in itertools.product((False, True), repeat=3):
            chosen = tiles_for(
                gpu, dtype, size, weight=weight, grouped=grouped, documents=documents
            )
            assert (
                chosen.kib == tiles_for(gpu, dtype, size, weight=False).kib
            )  # `no_tiles_reason` knows no weight
            assert chosen.kib * 1024 <= gpu.shared_memory
            assert chosen.tables.queries == chosen.tables.keys
            for tile in (chosen.forward, chosen.key_value, chosen.query, chosen.tables):
                assert tile.queries + tile.keys <= kernels.MARGIN
                assert tiles.ROWS % tile.queries == 0


def test_later_architectures_get_the_tiles_of_their_generation():
    """B300, Thor, DGX Spark and Orin; an unknown generation gets those that need the least shared
    memory.
    """
    for architecture, known in (
        (103, B200),
        (110, B200),
        (121, RTX_5090),
        (87, A100),
        (130, RTX_5090),
    ):
        gpu = Gpu("new", architecture, known.shared_memory)
        for size in (64, 128):
            expected = tiles_for(known, torch.bfloat16, size, weight=True)
            assert tiles_for(gpu, torch.bfloat16, size, weight=True) == expected


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Gpu("Tesla V100", 70, 96 * 1024), r"8\.0.*Tesla V100.*7\.0"),
        (Gpu("Future", 100, 99 * 1024), r"162 KiB.*torch\.bfloat16.*128.*Future.*99"),
    ],
)
def test_gpus_without_tiles_are_rejected_by_name(gpu, reason, gpu_of_this_machine, monkeypatch):
    """`auto` chooses another backend and says why. tests/gpu trains on such a GPU."""
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    gpu_of_this_machine(gpu)
    method = build(
        "alibi",
        ModelShape(num_heads=2, head_size=128, hidden_size=256, num_layers=1, max_positions=8),
    )
    known = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_size": 128}
    choice = describe_choice(ExpectedCalls(method=method, heads=2, kv_heads=2, **known))
    assert choice.startswith("chunked (auto: fused needs ")
    requirements = Requirements(**known)
    with pytest.raises(NotImplementedError, match=f"attention-backend 'fused'.*{reason}"):
        check_backend("fused", requirements)


def test_the_gpu_is_read_from_the_device(gpu_of_this_machine):
    gpu_of_this_machine(RTX_4090)
    assert Gpu.of(torch.device("cuda")) == RTX_4090
    assert Gpu.of(torch.device("cpu")).architecture == 90


def test_a_table_of_zeros_replaces_the_branch_around_the_mask(monkeypatch):
    """On GPUs where the branch would be slower: the same results."""
    torch.manual_seed(0)
    states = [torch.randn(1, 2, length, 16) for length in (20, 40, 40)]
    results = []
    for gpu in (H100, RTX_4090):
        monkeypatch.setattr(Gpu, "of", classmethod(lambda cls, device, gpu=gpu: gpu))
        results.append(attend(*[s.half() for s in states], window=17, backend="fused"))
    torch.testing.assert_close(*results)
    torch.testing.assert_close(
        results[1].float(), attend(*states, window=17, backend="reference"), rtol=2e-3, atol=2e-3
    )
