"""Configurations that this machine cannot run are rejected before anything is built, with the memory they need."""

import dataclasses

import pytest
import torch

from megatron.config import Config, UserError
from megatron.training import machine, memory
from megatron.training.distributed import Layout
from megatron.training.machine import check_machine, check_number_of_samples
from megatron.training.memory import estimate
from tests.support.runs import training_settings

LAYOUT = Layout(
    rank=0,
    world_size=1,
    pipeline_size=1,
    tensor_size=1,
    data_size=1,
    stage=0,
    data_rank=0,
    tensor_rank=0,
    device=torch.device("cpu"),
)


@pytest.fixture(autouse=True)
def sixteen_gigabytes(monkeypatch):
    for module in (machine, memory):
        monkeypatch.setattr(module, "free_memory", lambda device="cpu": 16 * 10**9)


def check(tmp_path, layout: Layout = LAYOUT, vocab_size: int = 512, **keys: object) -> None:
    config = Config.from_flat(training_settings(tmp_path, "data", **keys))
    check_machine(config, layout, vocab_size, lambda line: None, force=False)


def test_small_models_fit(tmp_path):
    check(tmp_path)
    check(tmp_path, pos_emb="learned", attention_backend="sdpa")


@pytest.mark.parametrize(
    ("keys", "vocab_size", "message"),
    [
        # 2 * 10^9 * 32 parameters: 4 bytes, 4 bytes, 8 bytes
        (
            {},
            10**9,
            r"1,024\.0 GB per rank, but 16\.0 GB .*weights 256\.0 GB, gradients 256\.0 GB, optimizer states 512\.0 GB.*"
            r"\(64,000,[0-9,]+ parameters: 64,000,000,000 in embeddings",
        ),
        ({"hidden_size": 2**18}, 512, "in blocks.*hidden_size"),
        ({"pos_emb": "learned", "max_position_embeddings": 2**31}, 512, "68,719,476,736 in the positional method"),
        ({"train_batch_size": 10**9}, 512, "activations [0-9,.]+ GB .*train_micro_batch_size_per_gpu: 1"),
        ({"seq_length": 2**31}, 512, "activations .*2,147,483,648 tokens.*seq_length"),
        ({"seq_length_val": 10**12}, 512, "activations"),
        ({"attention_backend": "flex"}, 512, "\"attention_backend\": .*'flex' cannot compute gradients on a CPU"),
        ({"attention_backend": "fused"}, 512, "\"attention_backend\": .*'fused'"),
    ],
)
def test_what_does_not_fit(tmp_path, keys, vocab_size, message, monkeypatch):
    monkeypatch.setattr("kerple.attention.backends.triton.launch._load_kernels", lambda: None)
    with pytest.raises(UserError, match=message):
        check(tmp_path, vocab_size=vocab_size, **keys)


def test_ranks_share_the_model(tmp_path):
    keys = {"hidden_size": 2**14, "num_layers": 8, "train_batch_size": 1}  # 8 * 12 * 2^28 parameters
    with pytest.raises(UserError, match="per rank"):
        check(tmp_path, **keys)
    check(tmp_path, dataclasses.replace(LAYOUT, world_size=64, pipeline_size=8, tensor_size=8), **keys)


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


def test_the_index_of_samples_must_fit():
    check_number_of_samples(10**9)
    with pytest.raises(UserError, match=r"needs 2,000,000,000 samples, whose index takes 24\.0 GB"):
        check_number_of_samples(2 * 10**9)
