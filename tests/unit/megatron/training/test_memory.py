"""The estimate of the memory of training equals values computed by hand."""

import dataclasses

import pytest

from megatron.config import Config
from megatron.training.memory import estimate
from tests.support.layouts import ONE_RANK as LAYOUT
from tests.support.runs import training_settings

# The small model has 2 * 512 * 32 elements in embeddings and 2 * 12 * 32^2 in blocks.
EMBEDDINGS, BLOCKS = 32_768, 24_576
ELEMENTS = EMBEDDINGS + BLOCKS


@pytest.mark.parametrize(
    ("keys", "replicas", "weights", "gradients", "optimizer"),
    [
        ({}, 1, 4 * ELEMENTS, 4 * ELEMENTS, 8 * ELEMENTS),
        ({"no_weight_tying": False}, 1, 4 * (ELEMENTS - 16_384), 4 * (ELEMENTS - 16_384), 8 * (ELEMENTS - 16_384)),
        ({"activation": "swiglu", "intermediate_size": 192}, 1, 4 * (ELEMENTS - 4_096), None, None),
        ({"optimizer": {"type": "SGD"}}, 1, 4 * ELEMENTS, 4 * ELEMENTS, 0),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 1, None, None, 4 * ELEMENTS),
        ({"optimizer": {"type": "Lion"}}, 1, None, None, 4 * ELEMENTS),
        ({"optimizer": {"type": "Muon"}}, 1, None, None, 4 * (2 * EMBEDDINGS + BLOCKS)),
        # ZeRO has fp32 master weights (4 bytes) besides Adam's states (8 bytes).
        ({"zero_optimization": {"stage": 1}}, 2, 4 * ELEMENTS, 4 * ELEMENTS, 6 * ELEMENTS),
        ({"zero_optimization": {"stage": 2}}, 2, 4 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"zero_optimization": {"stage": 3}}, 2, 2 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"precision": "bfloat16"}, 1, 2 * ELEMENTS, 4 * ELEMENTS, 12 * ELEMENTS),
        ({"precision": "fp16"}, 2, 2 * ELEMENTS, 2 * ELEMENTS, 6 * ELEMENTS),
        ({"precision": "bfloat16", "zero_optimization": {"stage": 3}}, 4, ELEMENTS / 2, ELEMENTS / 2, 3 * ELEMENTS),
        ({"train_iters": 0}, 1, 4 * ELEMENTS, 0, 0),
    ],
)
def test_weights_gradients_and_optimizer(tmp_path, keys, replicas, weights, gradients, optimizer):
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    memory = estimate(config, dataclasses.replace(LAYOUT, world_size=replicas, data_size=replicas), 512)
    for expected, value in ((weights, memory.weights), (gradients, memory.gradients), (optimizer, memory.optimizer)):
        assert expected in (None, value)


TOKENS, HIDDEN = 8 * 32, 32
LOGITS = 4 * TOKENS * 512  # bytes; not in chunks on a CPU


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # Equation 2 of Korthikanti et al. without dropout masks and scores: 32 s b h bytes per layer (16 bit).
        ({}, 2 * 64 * TOKENS * HIDDEN + LOGITS),
        ({"precision": "bfloat16"}, (2 * 64 * TOKENS * HIDDEN + LOGITS) / 2),
        ({"attention_backend": "reference"}, 2 * 64 * TOKENS * HIDDEN + 2 * 4 * 8 * 4 * 32**2 + LOGITS),
        ({"checkpoint_activations": True}, (2 * 4 + 64) * TOKENS * HIDDEN + LOGITS),
        ({"train_micro_batch_size_per_gpu": 2}, (2 * 64 * TOKENS * HIDDEN + LOGITS) / 4),
    ],
)
def test_activations(tmp_path, keys, expected):
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    assert estimate(config, LAYOUT, 512).activations == expected


def test_tensor_parallel_activations(tmp_path):
    """Equation 2: 8 + 24 / t bytes in half precision, without dropout masks."""
    config = Config.from_flat(training_settings(tmp_path, "data"))
    layout = dataclasses.replace(LAYOUT, world_size=2, tensor_size=2)
    assert estimate(config, layout, 512).activations == 2 * (16 + 48 / 2) * TOKENS * HIDDEN + LOGITS / 2
