"""Kernel launches and memory of a training step, counted on a simulated CUDA device."""

import itertools
from dataclasses import replace

import pytest
import torch

from kerple.attention import Documents
from tests.gpu.test_methods import cuda_model, settings_for
from tests.support.simulated_cuda import SimulatedCuda


def kernels_and_memory(
    method: str, layers: int, batch: int = 32, length: int = 512
) -> tuple[int, int]:
    """Kernel launches and peak bytes of a forward and backward pass of the 162M recipe's model."""
    with SimulatedCuda() as device:
        model = cuda_model(
            replace(settings_for(method, "auto", f"num-layers={layers}"), padded_vocab_size=128)
        ).train()
        tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
        model.loss(tokens, tokens).backward()  # fills caches
        model.zero_grad(set_to_none=True)
        device.reset()
        model.loss(tokens, tokens).backward()
    return device.kernels.total(), device.peak


def test_documents_take_no_more_kernels_per_layer():
    """The kernels of each layer compute all documents of the rows."""
    documents = Documents(torch.stack((torch.arange(512) // 200, torch.arange(512) // 77)))
    counts = []
    for layers, apart in itertools.product((1, 2), (False, True)):
        with SimulatedCuda() as device:
            settings = replace(
                settings_for("kerple_log", "auto", f"num-layers={layers}"), padded_vocab_size=128
            )
            model = cuda_model(settings).train()
            tokens = torch.zeros(2, 512, dtype=torch.long, device="cuda")
            options = {"documents": documents.to(tokens.device)} if apart else {}
            device.reset()
            model.loss(tokens, tokens, **options).backward()
        counts.append(device.kernels.total())
    joint, apart, joint_2, apart_2 = counts
    assert apart_2 - apart - (joint_2 - joint) <= 3  # results that start with zeros


@pytest.mark.ci
@pytest.mark.parametrize("method", ["dape_v2_kerple", "fire", "cope"])
def test_methods_with_modify_scores_launch_few_kernels(method):
    """The limit is per layer, at the recipe's shape. DAPE with FIRE's bias computes two methods."""
    one, two = (kernels_and_memory(method, layers)[0] for layers in (1, 2))
    assert two - one <= 150


@pytest.mark.ci
def test_chunks_keep_memory_linear():
    """With the same number of tokens, longer sequences need no more memory."""
    short, long = (
        kernels_and_memory("cope", 1, batch, length)[1] for batch, length in ((32, 512), (4, 4096))
    )
    assert long <= 1.3 * short
